"""compile_tpu.py: the report on the engine's programs, worked out for a real topology."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import umbra
from umbra.configs.engine import BLOCK, EngineConfig
from umbra.configs.models import named
from umbra.kernels.attention import KVFormat
from umbra.kernels.attention.reference import TILE
from umbra.kernels.backend import choose
from umbra.kernels.draft import SHADOW_PLACES
from umbra.scripts.tpu import assume, chips
from umbra.scripts.tpu.jobs import decode_jobs, draft_weights, engine_jobs, roofline_jobs

SCRIPT = Path(umbra.__file__).parent / "scripts" / "compile_tpu.py"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture
def uncached() -> Iterator[None]:
    """Programs for a topology cannot be read back from the compilation cache without a TPU."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def mesh() -> Any:
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (x86-64 Linux)")
    return make_mesh_of(named("tiny"))


def make_mesh_of(config: Any) -> Any:
    from umbra.serving.engine.programs import make_mesh

    return make_mesh(chips.devices("v5e:2x2"), config)


def target(mesh: Any, **changed: Any) -> Any:
    from umbra.scripts.tpu.jobs import Target

    how: dict[str, Any] = dict(
        config=named("tiny"), mesh=mesh, kernels=choose("tpu").kernels, quant="none", kv="auto", context=300,
        sampling="greedy", decode_steps=2,
    )  # fmt: skip
    return Target(**how | changed)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (x86-64 Linux)")
    out = tmp_path_factory.mktemp("tpu") / "report.json"
    done = run(
        "--model", "tiny", "--slots", "4", "--decode-steps", "2", "--context", "300", "--sequences", "2,4",
        "--json", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "tok/s" in done.stdout
    return json.loads(out.read_text())


def test_the_server_warms_up_the_same_programs(mesh: Any, random_shadow: Callable) -> None:
    """What an engine compiles before it is ready is the list that is compiled for a TPU, in names and shapes."""
    import jax

    from umbra.model.load import load_model
    from umbra.serving.engine import Engine, Program

    def described(listed: list[Program], shards: int) -> list[tuple[str, str, Any]]:
        """Names, kinds and shapes of the step's input per data shard."""
        inputs = {p.name: p.args[3] if p.kind in ("prefill", "decode", "decode_n") else p.args[1] for p in listed}
        shapes = {name: jax.tree.map(lambda s: (s.shape[0] // shards, *s.shape[1:]), i) for name, i in inputs.items()}
        return [(p.name, p.kind, shapes[p.name]) for p in listed]

    config = EngineConfig(slots=4, context_length=512, blocks=9, decode_steps=2, draft_rows=28)
    model = load_model("tiny")
    model = dataclasses.replace(model, shadow=random_shadow(model.config.vocab_size, model.config.d_model))
    with Engine(model, config) as engine:
        engine.start()
        assert engine.device.compiled == {program.kind for program in engine.programs}
        warmed = described(engine.programs, 1)
    assert warmed == described(target(mesh).programs(config), mesh.shape["data"])


def test_compiles_exactly_the_programs_of_the_engine(report: dict[str, Any], mesh: Any) -> None:
    """And the decode programs for other numbers of sequences. The single pass stands there three times: with a token of
    each sequence, with drafts behind it, and what drafting costs in it."""
    listed = target(mesh).programs(EngineConfig(slots=4, decode_steps=2))
    listed += [p for p in target(mesh).programs(EngineConfig(slots=2, decode_steps=2)) if p.kind.startswith("decode")]
    wanted = []
    for p in listed:
        for kind in ("decode", "verify", "draft") if p.kind == "decode" else (p.kind,):
            wanted.append((p.name, kind, p.sequences, p.width))
    assert [(r["name"], r["kind"], r["sequences"], r["width"]) for r in report["programs"]] == wanted


def test_our_kernels_are_in_the_steps(report: dict[str, Any]) -> None:
    for row in report["programs"]:
        assert (row.get("l1_mode") in ("hbm", "vmem_resident")) == (row["kind"] == "decode_n")
        if row["kind"] in ("prefill", "decode", "verify"):
            assert row["kernel_calls"] == {
                "umbra_attention": named("tiny").n_layers, "umbra_embed": 1 + SHADOW_PLACES, "umbra_greedy_head": 1,
            }  # fmt: skip
            assert row["custom_kernels"] == sorted(row["kernel_calls"])
            assert row["operations"]["kernel"] == sum(row["kernel_calls"].values())
            assert row["operations"]["collective"] > 0
        if row["kind"] == "draft":
            assert row["kernel_calls"] == {"umbra_embed": SHADOW_PLACES}
            assert row["operations"]["collective"] == 0
    assert report["settings"]["kernels"] == {
        "linear": "tpu", "attention": "tpu", "sample": "xla", "draft": "tpu", "passes": "xla"
    }  # fmt: skip


def test_the_device_loop_keeps_kv_on_the_chip(report: dict[str, Any]) -> None:
    assert [(row["kind"], row["l1_mode"]) for row in report["programs"] if "l1_mode" in row] == [
        ("decode_n", "vmem_resident")
    ] * 2
    for loop in (row for row in report["programs"] if row["kind"] == "decode_n"):
        assert loop["kernel_calls"]["umbra_stage"] == 1
        (one,) = (r for r in report["programs"] if (r["kind"], r["sequences"]) == ("decode", loop["sequences"]))
        assert loop["bytes_accessed"] < 2 * one["bytes_accessed"]


def test_without_a_place_on_the_chip_the_loop_reads_hbm(
    mesh: Any, uncached: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of the same name with half of the window takes its place, and then the one without a window, whether
    the compiler keeps the window elsewhere or refuses it."""
    from umbra.kernels.attention import tpu_hot

    def loop() -> Any:
        return next(p for p in target(mesh).programs(EngineConfig(slots=4, decode_steps=2)) if p.kind == "decode_n")

    program = loop()
    half, none = program.fallback, program.fallback.fallback
    assert half.hot[0].shape[0] == program.hot[0].shape[0] // 2 and none.hot == ()
    modes = iter(["hbm", "vmem_resident"])
    with monkeypatch.context() as patch:
        patch.setattr(tpu_hot, "l1_mode", lambda *_: next(modes))
        assert program.compile().program is half
    monkeypatch.setattr(tpu_hot, "stage", _refuse)
    program = loop()
    built = program.compile()
    assert (built.program, built.l1_mode) == (program.fallback.fallback, "hbm")
    assert built.program.name == program.name


def windows(program: Any) -> list[int]:
    """Blocks of each window that a program of the device loop is tried with."""
    found = []
    while program.fallback is not None:
        found.append(program.hot[0].shape[0])
        program = program.fallback
    assert program.hot == ()
    return found


@pytest.mark.usefixtures("mesh")
def test_a_window_has_a_place_for_every_sequence() -> None:
    """With less than one block for each, nothing would be staged when all of them run. The shadow's place on the chip
    is not the window's; the table of all tokens, of which it reads a few rows, takes none."""
    config = named("smollm2-135m")
    for slots, drafts, tried in ((8, False, [17, 8]), (8, True, [16, 8]), (16, True, [16]), (32, True, [])):
        listed = target(make_mesh_of(config), config=config, drafts=drafts).programs(EngineConfig(slots=slots))
        assert windows(next(p for p in listed if p.kind == "decode_n")) == tried


def _refuse(*_: Any) -> Any:
    raise ValueError("no room")


def test_every_program_compiles_and_fits(report: dict[str, Any]) -> None:
    assert report["chip"] == "v5e"
    assert report["mesh"] == {"data": 2, "model": 2}
    for row in report["programs"]:
        assert row["compiled"] and row["fits"]
        kinds = row["memory"]
        assert row["hbm_bytes"] == kinds["arguments"] + kinds["outputs"] + kinds["temporaries"] - kinds["aliased"]


def test_figures_of_a_step(report: dict[str, Any]) -> None:
    rows = {row["kind"]: row for row in report["programs"] if row["sequences"] == 4}
    for kind in ("prefill", "decode", "decode_n"):
        row = rows[kind]
        assert row["bytes_ratio"] == pytest.approx(row["bytes_accessed"] / row["min_bytes"])
        if kind != "decode_n":  # which reads some of the KV once for all of its passes
            assert row["bytes_ratio"] >= 1
        peak = chips.CHIPS["v5e"]
        bound = max(row["flops"] / peak.flops_per_second, row["bytes_accessed"] / peak.bytes_per_second)
        assert row["bound_s"] == pytest.approx(bound)
        assert row["predicted_tok_s"] > 0
        assert row["largest"][0]["bytes"] >= row["largest"][-1]["bytes"] > 0
    assert rows["decode_n"]["min_bytes"] == 2 * rows["decode"]["min_bytes"]
    assert (rows["decode"]["new_tokens"], rows["verify"]["new_tokens"]) == (1, 8)
    assert rows["decode"]["bytes_accessed"] < rows["verify"]["bytes_accessed"] < 1.2 * rows["decode"]["bytes_accessed"]
    # Two data shards of four slots; the prefill step gets on with a chunk of prompt tokens on each.
    assert rows["decode"]["predicted_tok_s"] == pytest.approx(2 * 4 / rows["decode"]["bound_s"])
    assert rows["prefill"]["predicted_tok_s"] == pytest.approx(2 * 128 / rows["prefill"]["bound_s"])
    assert rows["admit"]["predicted_tok_s"] is None


def test_figures_of_drafting(report: dict[str, Any]) -> None:
    """The same in every pass; it reads a few rows of the table of all tokens, not the table, and what every place of
    the chains multiplies with once."""
    rows = {row["kind"]: row for row in report["programs"] if row["sequences"] == 4}
    part = rows["draft"]
    assert part["drafted"] == SHADOW_PLACES and part["predicted_tok_s"] is None
    assert sum(o["bytes"] for o in part["largest"] if o["operation"].endswith("dot_general")) < part["min_bytes"]
    for kind in ("decode", "verify", "draft"):
        assert rows[kind]["draft_bytes"] == pytest.approx(part["bytes_accessed"])  # summed up in another order
        assert rows[kind]["draft_bytes"] > part["min_bytes"]
        assert rows[kind]["draft_flops"] == part["flops"] > 0
    assert rows["decode"]["min_bytes"] > part["min_bytes"]
    assert rows["admit"]["draft_bytes"] == 0
    told = report["settings"]["drafting"]
    assert told["rows"] == 28 and told["drafted_tokens"] == SHADOW_PLACES
    assert told["tokens_of_a_sequence"] == {"prefill": 1, "decode": 1, "decode_n": 1, "verify": 8}
    assert told["shadow"]["parameters"] > 0
    accepted = rows["verify"]["accepted"]
    assert [a["tokens_per_pass"] for a in accepted] == [1, 2, 2.3, 3, 5, 8]
    assert accepted[-1]["tok_s_chip"] == pytest.approx(rows["verify"]["predicted_tok_s_chip"])
    assert accepted[2]["tok_s_chip"] == pytest.approx(2.3 * accepted[0]["tok_s_chip"])


def test_shapes_of_the_shadow() -> None:
    """What is compiled for is what model/shadow.py derives from a shadow of that size."""
    import jax
    import numpy as np

    from umbra.configs.shadow import ShadowConfig
    from umbra.model.shadow import drafting_from, initial

    trunk = named("tiny")
    config = ShadowConfig.for_trunk(trunk, (0.0, 0.8), 64)
    table = np.random.default_rng(0).standard_normal((trunk.vocab_size, trunk.d_model)).astype(np.float32)
    made = drafting_from(initial(config, np.arange(64)), table)
    described = jax.tree.map(lambda x: (x.shape, x.dtype), made)
    assert described == jax.tree.map(lambda x: (x.shape, x.dtype), draft_weights(config, trunk.vocab_size))


def test_programs_that_never_draft(mesh: Any) -> None:
    listed = decode_jobs(target(mesh, drafts=False), (2,))
    assert [[case.kind for case in job.cases] for job in listed] == [["decode"], ["decode_n"]]
    for job in listed:
        assert job.program.args[0].drafter is None and job.program.width == 2
        assert job.cases[0].load.drafted(job.program) == 0


@pytest.mark.parametrize(("kernels", "quant"), [("xla", "none"), ("tpu", "none"), ("tpu", "int8")])
def test_products_are_counted_in_full(mesh: Any, uncached: None, kernels: str, quant: str) -> None:
    """Layers for every row, the head for every slot, attention for every span of 128 tokens: on one of two shards.
    Plain JAX attends with whole tiles of queries."""
    from umbra.scripts.tpu import report

    c, slots, spans = named("tiny"), 4, 3
    how = target(mesh, kernels=choose("tpu", kernels).kernels, quant=quant)
    (job,) = (job for job in engine_jobs(how, slots) if job.program.kind == "decode")
    decode, _, draft = report.rows(job, mesh, chips.CHIPS["v5e"])
    projections = 2 * c.d_model * c.head_dim * (c.n_heads + c.n_kv_heads)
    layers = decode["width"] * c.n_layers * (projections + 3 * c.d_model * c.d_ff)
    head = decode["width"] * c.vocab_size * c.d_model
    rows = TILE if kernels == "xla" else 1
    attention = slots * c.n_layers * spans * 2 * rows * c.n_heads * BLOCK * c.head_dim
    assert decode["flops"] - draft["flops"] == pytest.approx(2 * (layers + head + attention) / 2, rel=0.02)
    shadow, lanes = how.shadow, 128
    r, m = shadow.rank, shadow.mlp
    cell = 2 * r * r + r * r + 2 * r * m + shadow.vocab * (r if kernels == "xla" else -(-r // lanes) * lanes)
    drafted = slots * (SHADOW_PLACES * (cell + 2 * r) + c.d_model * r)
    assert draft["flops"] == pytest.approx(2 * drafted, rel=0.05)
    assert [text for text in decode["assumptions"].values() if "unknown" in text] == []


def test_a_pass_of_several_tokens(mesh: Any) -> None:
    """Five tokens of each sequence read its KV once, and the weights once."""
    one, five = roofline_jobs(target(mesh), (2,), (1, 5))
    assert (one.program.kind, five.program.kind) == ("decode", "decode")
    assert (one.program.width, five.program.width) == (2, 10)
    (single,), (several,) = one.cases, five.cases
    assert (single.kind, several.kind) == ("decode", "verify")
    assert (single.load.drafted(one.program), several.load.drafted(five.program)) == (0, SHADOW_PLACES)
    assert several.load.lengths(five.program) == ([300, 300], [5, 5])
    assert several.load.tokens_per_run(five.program, mesh) == 2 * 5 * mesh.shape["data"]
    work = [job.cases[0].load.attention(job.program, mesh, "v5e") for job in (one, five)]
    assert work[1].flops == 5 * work[0].flops
    assert work[1].bytes < 1.1 * work[0].bytes
    assert single.load.min_bytes(one.program, mesh) < several.load.min_bytes(five.program, mesh)


def test_blocks_that_stay_on_the_chip_are_not_read_again(mesh: Any) -> None:
    """The device loop stages two full blocks of each sequence's 300 tokens; a third, not full, comes from the pool."""
    how = target(mesh)
    (loop,) = (job for job in engine_jobs(how, 4) if job.program.kind == "decode_n")
    plain = loop.program
    while plain.fallback is not None:
        plain = plain.fallback
    assert loop.program.hot and not plain.hot
    load = loop.cases[0].load
    with_window, without = (load.attention(program, mesh, "v5e").bytes for program in (loop.program, plain))
    c = named("tiny")
    block = BLOCK * load.kv.bytes_per_token(1, c.n_kv_heads // mesh.shape["model"], c.head_dim)
    assert without - with_window == 4 * 2 * block


def test_a_context_longer_than_the_default(mesh: Any) -> None:
    """The pool has room for what is assumed to be in it."""
    how = target(mesh, config=named("llama-3.1-8b"), context=44_000)
    engine = how.engine(8)
    assert engine.context(how.config) >= 44_001
    assert engine.pool_blocks(how.config, 1) > 8 * (44_000 // BLOCK)


def test_weights_that_must_be_read(mesh: Any) -> None:
    """int8 is one byte a weight and a scale a channel; a mere embedding counts the rows of the step's tokens."""
    c = dataclasses.replace(named("tiny"), tied_embeddings=False)
    matrices = c.n_layers * (2 * c.d_model * c.head_dim * (c.n_heads + c.n_kv_heads) + 3 * c.d_model * c.d_ff)
    channels = c.n_layers * (c.head_dim * (c.n_heads + 2 * c.n_kv_heads) + 2 * c.d_model + 2 * c.d_ff)
    norms = (2 * c.n_layers + 1) * c.d_model
    split = mesh.shape["model"]
    plain = (matrices + c.vocab_size * c.d_model) / split + norms + 8 * c.d_model / split
    assert assume.weight_bytes(c, target(mesh, config=c).params(), 8) == pytest.approx(2 * plain, rel=1e-9)
    # Scales of what is split along its inputs are on every chip, and norms are float32.
    whole = c.n_layers * 2 * c.d_model
    scales = (channels - whole + c.vocab_size) / split + whole
    int8 = (matrices + c.vocab_size * c.d_model) / split + 4 * scales + 4 * norms + 8 * (c.d_model + 4) / split
    assert assume.weight_bytes(c, target(mesh, config=c, quant="int8").params(), 8) == pytest.approx(int8, rel=1e-9)


def test_every_loop_is_understood(report: dict[str, Any]) -> None:
    """No loop of the step is counted once for want of a rule (`assume.Load.assume`)."""
    listed = [text for row in report["programs"] for text in row["assumptions"].values()]
    assert listed
    assert [text for text in listed if "unknown" in text] == []


def test_load_of_a_model_with_sliding_windows() -> None:
    load = assume.Load(named("gemma3-270m"), EngineConfig(), KVFormat("bfloat16"), 1024)
    assert load.seen == [512, 512, 512, 512, 512, 1024] * 3
    assert load.spans == pytest.approx((5 * 4 + 8) / 6)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "gpt"], "known: tiny"),
        (["--topology", "v5e"], "for example v5e:2x2"),
        (["--mesh", "data=1,model=4"], "K = 3"),
        (["--mesh", "data=3,model=1"], "needs 3 devices; there are 4"),
        (["--mesh", "rows=2"], "data=2,model=4"),
        (["--context", "100000"], "may be at most 8192"),
        (["--sequences", "1,x"], "at least 1"),
        (["--quant", "int2"], "supported: none, int8, int4"),
        (["--kernels", "cpu"], "supported: auto, xla, tpu"),
        (["--slots", "0"], "at least 1"),
        (["--draft", "shadow"], "supported: auto, off"),
        (["--level", "high"], "--level"),
    ],
)
def test_wrong_usage(args: list[str], message: str) -> None:
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (x86-64 Linux)")
    done = run(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
