"""compile_tpu.py: the report on the engine's programs, worked out for a real topology."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import umbra
from umbra.configs.engine import BLOCK, EngineConfig
from umbra.configs.models import named
from umbra.kernels.attention.reference import GROUP
from umbra.scripts.tpu import assume, chips

SCRIPT = Path(umbra.__file__).parent / "scripts" / "compile_tpu.py"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def mesh() -> Any:
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (x86-64 Linux)")
    from umbra.serving.engine.programs import make_mesh

    return make_mesh(chips.devices("v5e:2x2"), named("tiny"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (x86-64 Linux)")
    out = tmp_path_factory.mktemp("tpu") / "report.json"
    done = run("--model", "tiny", "--slots", "4", "--decode-steps", "2", "--context", "300", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "tok/s" in done.stdout
    return json.loads(out.read_text())


def test_the_server_warms_up_the_same_programs(mesh: Any) -> None:
    """What an engine compiles before it is ready is the list that is compiled for a TPU, in names and shapes."""
    import jax
    import jax.numpy as jnp

    from umbra.model.load import load_model
    from umbra.serving.engine import Engine, Program
    from umbra.serving.engine.programs import programs

    def described(listed: list[Program], shards: int) -> list[tuple[str, str, Any]]:
        """Names, kinds and shapes of the step's input per data shard."""
        inputs = {p.name: p.args[3] if p.kind in ("prefill", "decode", "decode_n") else p.args[1] for p in listed}
        shapes = {name: jax.tree.map(lambda s: (s.shape[0] // shards, *s.shape[1:]), i) for name, i in inputs.items()}
        return [(p.name, p.kind, shapes[p.name]) for p in listed]

    config = EngineConfig(slots=4, context_length=512, blocks=9, decode_steps=2)
    with Engine(load_model("tiny"), config) as engine:
        engine.start()
        assert engine.device.compiled == {program.kind for program in engine.programs}
        warmed = described(engine.programs, 1)
    assert warmed == described(programs(named("tiny"), config, mesh, dtype=jnp.bfloat16), mesh.shape["data"])


def test_compiles_exactly_the_programs_of_the_engine(report: dict[str, Any], mesh: Any) -> None:
    import jax.numpy as jnp

    from umbra.serving.engine.programs import programs

    listed = programs(named("tiny"), EngineConfig(slots=4, decode_steps=2), mesh, dtype=jnp.bfloat16)
    wanted = [(p.name, p.kind, p.sequences, p.width) for p in listed]
    assert [(r["name"], r["kind"], r["sequences"], r["width"]) for r in report["programs"]] == wanted


def test_every_program_compiles_and_fits(report: dict[str, Any]) -> None:
    assert report["chip"] == "v5e"
    assert report["mesh"] == {"data": 2, "model": 2}
    for row in report["programs"]:
        assert row["compiled"] and row["fits"]
        kinds = row["memory"]
        assert row["hbm_bytes"] == kinds["arguments"] + kinds["outputs"] + kinds["temporaries"] - kinds["aliased"]


def test_figures_of_a_step(report: dict[str, Any]) -> None:
    rows = {row["kind"]: row for row in report["programs"]}
    for kind in ("prefill", "decode", "decode_n"):
        row = rows[kind]
        assert row["bytes_ratio"] == pytest.approx(row["bytes_accessed"] / row["min_bytes"])
        assert row["bytes_ratio"] >= 1
        peak = chips.CHIPS["v5e"]
        bound = max(row["flops"] / peak.flops_per_second, row["bytes_accessed"] / peak.bytes_per_second)
        assert row["bound_s"] == pytest.approx(bound)
        assert row["predicted_tok_s"] > 0
        assert row["largest"][0]["bytes"] >= row["largest"][-1]["bytes"] > 0
    assert rows["decode_n"]["min_bytes"] == 2 * rows["decode"]["min_bytes"]
    # Two data shards of four slots; the prefill step gets on with a chunk of prompt tokens on each.
    assert rows["decode"]["predicted_tok_s"] == pytest.approx(2 * 4 / rows["decode"]["bound_s"])
    assert rows["prefill"]["predicted_tok_s"] == pytest.approx(2 * 128 / rows["prefill"]["bound_s"])
    assert rows["admit"]["predicted_tok_s"] is None


def test_products_are_counted_in_full(report: dict[str, Any]) -> None:
    """Layers for every row, the head for every slot, attention for every span of 128 tokens: on one of two shards."""
    c, slots, spans = named("tiny"), 4, 3
    (decode,) = (row for row in report["programs"] if row["kind"] == "decode")
    projections = 2 * c.d_model * c.head_dim * (c.n_heads + c.n_kv_heads)
    layers = decode["width"] * c.n_layers * (projections + 3 * c.d_model * c.d_ff)
    head = slots * c.vocab_size * c.d_model
    attention = slots * c.n_layers * spans * 2 * GROUP * c.n_heads * BLOCK * c.head_dim
    assert decode["flops"] == pytest.approx(2 * (layers + head + attention) / 2, rel=0.02)


def test_every_loop_is_understood(report: dict[str, Any]) -> None:
    """No loop of the step is counted once for want of a rule (`assume.Load.assume`)."""
    listed = [text for row in report["programs"] for text in row["assumptions"].values()]
    assert listed
    assert [text for text in listed if "unknown" in text] == []


def test_load_of_a_model_with_sliding_windows() -> None:
    load = assume.Load(named("gemma3-270m"), EngineConfig(), 1024)
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
        (["--slots", "0"], "at least 1"),
        (["--level", "high"], "--level"),
    ],
)
def test_wrong_usage(args: list[str], message: str) -> None:
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (x86-64 Linux)")
    done = run(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
