"""The HLO walker: on texts whose traffic is worked out by hand, and on real programs compiled for a TPU topology."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from umbra.scripts.tpu import chips, hlo, loops, traffic
from umbra.scripts.tpu.flops import flops

SMALL = 8192
"""Scalars, counters and index arithmetic: bytes that the expected figures leave out."""


@pytest.fixture(autouse=True, scope="module")
def no_compilation_cache() -> Iterator[None]:
    """Programs for a topology cannot be read back without a TPU."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def parse(text: str) -> hlo.Module:
    return hlo.parse(textwrap.dedent(text))


# --- the text -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("bf16[16,1024]{1,0:T(8,128)(2,1)}", 16 * 1024 * 2),
        ("bf16[100,64]{1,0:T(8,128)(2,1)}", 104 * 128 * 2),  # rows and lanes are padded to the tile
        ("bf16[64,100]{0,1:T(8,128)(2,1)}", 104 * 128 * 2),  # the same, stored the other way round
        ("s4[256]{0}", 128),
        ("pred[3]{0}", 3),
        ("f8e4m3fn[10]{0}", 10),
        ("f32[]", 4),
    ],
)
def test_bytes_of_a_shape(text: str, size: int) -> None:
    module = parse(f"""
        ENTRY %main (p: f32[]) -> f32[] {{
          ROOT %p = {text} parameter(0)
        }}
        """)
    assert module.computations["main"].instructions["p"].result.bytes == size


def test_instruction_fields() -> None:
    module = parse("""
        FileNames
        1 "/a/b/step.py"

        FunctionNames
        1 "run_pass"

        FileLocations
        1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=0 end_column=0}

        StackFrames
        7 {file_location_id=1 parent_frame_id=7}

        ENTRY %main.1 (a: (f32[2], s32[])) -> f32[2] {
          %a = (f32[2]{0:S(1)}, /*index=1*/s32[]) parameter(0)
          ROOT %g = f32[2]{0} get-tuple-element(%a), index=0, metadata={op_name="jit(f)/while" stack_frame_id=7}
        }
        """)
    instructions = module.computations[module.entry].instructions
    assert module.entry == "main.1"
    assert [a.space for a in instructions["a"].results] == [1, hlo.HBM]
    assert instructions["a"].results[0].hbm_bytes == 0
    assert instructions["g"].operands == ("a",)
    assert instructions["g"].attribute("index") == "0"
    assert instructions["g"].op_name == "jit(f)/while"
    assert module.source(instructions["g"]) == "step.py:run_pass"


def test_work_handed_to_another_core() -> None:
    """A v6e scatters on its sparse cores: a call that starts and ends elsewhere, in computations of that thread."""
    module = parse("""
        %there (x: f32[1024]) -> f32[1024] {
          %x = f32[1024]{0} parameter(0)
          ROOT %y = f32[1024]{0} negate(%x)
        }, execution_thread="sparsecore"

        ENTRY %main (x: f32[1024]) -> f32[1024] {
          %x = f32[1024]{0} parameter(0)
          %s = ((f32[1024]{0}), f32[1024]{0}, u32[]{:S(8)}) call-start(%x), async_execution_thread="sparsecore", to_apply=%there
          ROOT %d = f32[1024]{0} call-done(%s)
        }
        """)  # noqa: E501 (one instruction is one line)
    assert set(module.computations) == {"there", "main"}
    assert traffic.count(module).bytes == 2 * 4096


def test_text_that_is_not_a_program() -> None:
    with pytest.raises(hlo.HloError, match="no ENTRY computation"):
        hlo.parse("hello")
    with pytest.raises(hlo.HloError, match="element type 'f7' is not known"):
        _ = hlo.Array("f7", (2,)).bytes


LOOP = """
    %body (p: (s32[], f32[1024])) -> (s32[], f32[1024]) {{
      %p = (s32[], f32[1024]{{0}}) parameter(0)
      %i = s32[] get-tuple-element(%p), index=0
      %x = f32[1024]{{0}} get-tuple-element(%p), index=1
      %step = s32[] constant({step})
      %next = s32[]{{:S(6)}} add(%i, %step)
      %y = f32[1024]{{0}} negate(%x)
      ROOT %t = (s32[], f32[1024]{{0}}) tuple(%next, %y)
    }}

    %condition (p: (s32[], f32[1024])) -> pred[] {{
      %p = (s32[], f32[1024]{{0}}) parameter(0)
      %i = s32[] get-tuple-element(%p), index=0
      %n = s32[] constant({bound})
      ROOT %more = pred[]{{:S(6)}} compare({sides}), direction={direction}
    }}

    ENTRY %main (x: f32[1024], start: s32[]) -> f32[1024] {{
      %x = f32[1024]{{0}} parameter(0)
      %start = s32[] parameter(1)
      %zero = s32[] {first}
      %t = (s32[], f32[1024]{{0}}) tuple(%zero, %x)
      %loop = (s32[], f32[1024]{{0}}) while(%t), condition=%condition, body=%body, metadata={{op_name="jit(f)/while"}}
      ROOT %y = f32[1024]{{0}} get-tuple-element(%loop), index=1
    }}
    """


@pytest.mark.parametrize(
    ("first", "step", "bound", "sides", "direction", "trips"),
    [
        ("constant(0)", 1, 12, "%i, %n", "LT", 12),
        ("constant(2)", 3, 12, "%i, %n", "LT", 4),
        ("constant(0)", 1, 12, "%i, %n", "LE", 13),
        ("constant(0)", 1, 12, "%n, %i", "GT", 12),
        ("constant(9)", -2, 0, "%i, %n", "GT", 5),
        ("constant(5)", 1, 5, "%i, %n", "LT", 0),
        ("copy(%start)", 1, 12, "%i, %n", "LT", None),
        ("constant(0)", 0, 12, "%i, %n", "LT", None),
    ],
)
def test_trip_counts(first: str, step: int, bound: int, sides: str, direction: str, trips: int | None) -> None:
    module = parse(LOOP.format(first=first, step=step, bound=bound, sides=sides, direction=direction))
    main = module.computations["main"]
    assert loops.trip_count(module, main, main.instructions["loop"], {}) == trips


def test_a_loop_that_depends_on_data_is_asked_for_and_listed() -> None:
    text = LOOP.format(first="copy(%start)", step=1, bound=12, sides="%i, %n", direction="LT")
    once = traffic.count(parse(text))
    assert once.assumptions == {"loop jit(f)/while": "1 iterations: unknown, counted once"}
    asked = []

    def assume(source: str, op_name: str) -> tuple[float, str]:
        asked.append((source, op_name))
        return 7, "seven"

    seven = traffic.count(parse(text), traffic.Assume(loop=assume))
    assert asked == [("", "jit(f)/while")]
    assert seven.assumptions == {"loop jit(f)/while": "7 iterations: seven"}
    assert seven.by_operation["negate"] == 7 * once.by_operation["negate"] == 7 * 2 * 4096


def test_only_the_needed_part_of_a_fusion_operand_counts() -> None:
    module = parse("""
        %inner (p0: f32[64,1024]) -> f32[64,1024] {
          %p0 = f32[64,1024]{1,0} parameter(0)
          ROOT %c = f32[64,1024]{1,0} negate(%p0)
        }

        %fused (p0: f32[64,1024], p1: s32[], p2: f32[2,1024]) -> f32[2,1024] {
          %p0 = f32[64,1024]{1,0} parameter(0)
          %p1 = s32[]{:S(6)} parameter(1)
          %p2 = f32[2,1024]{1,0} parameter(2)
          %n = f32[64,1024]{1,0} fusion(%p0), kind=kLoop, calls=%inner
          %s = f32[2,1024]{1,0} dynamic-slice(%n, %p1, %p1), dynamic_slice_sizes={2,1024}
          ROOT %r = f32[2,1024]{1,0} add(%s, %p2)
        }

        ENTRY %main (a: f32[64,1024], i: s32[], b: f32[2,1024]) -> f32[2,1024] {
          %a = f32[64,1024]{1,0} parameter(0)
          %i = s32[]{:S(6)} parameter(1)
          %b = f32[2,1024]{1,0} parameter(2)
          ROOT %f = f32[2,1024]{1,0} fusion(%a, %i, %b), kind=kLoop, calls=%fused
        }
        """)
    assert traffic.count(module).bytes == 3 * 2 * 1024 * 4


def test_in_place_update_inside_a_fusion_with_two_results() -> None:
    module = parse("""
        %fused (p0: f32[64,1024], p1: f32[1,1024], p2: s32[]) -> (f32[64,1024], f32[1,1024]) {
          %p0 = f32[64,1024]{1,0} parameter(0)
          %p1 = f32[1,1024]{1,0} parameter(1)
          %p2 = s32[]{:S(6)} parameter(2)
          %n = f32[1,1024]{1,0} negate(%p1)
          %u = f32[64,1024]{1,0} dynamic-update-slice(%p0, %n, %p2, %p2)
          ROOT %t = (f32[64,1024]{1,0}, f32[1,1024]{1,0}) tuple(%u, %n)
        }

        ENTRY %main (a: f32[64,1024], b: f32[1,1024], i: s32[]) -> (f32[64,1024], f32[1,1024]) {
          %a = f32[64,1024]{1,0} parameter(0)
          %b = f32[1,1024]{1,0} parameter(1)
          %i = s32[]{:S(6)} parameter(2)
          ROOT %f = (f32[64,1024]{1,0}, f32[1,1024]{1,0}) fusion(%a, %b, %i), kind=kLoop, calls=%fused
        }
        """)
    assert traffic.count(module).bytes == 3 * 4096  # the row is read once and written twice


def test_asynchronous_pairs_count_once() -> None:
    module = parse("""
        ENTRY %main (a: f32[64,1024]) -> f32[8,1024] {
          %a = f32[64,1024]{1,0} parameter(0)
          %c = (f32[64,1024]{1,0:S(1)}, f32[64,1024]{1,0}, u32[]{:S(2)}) copy-start(%a)
          %d = f32[64,1024]{1,0:S(1)} copy-done(%c)
          %s = ((f32[64,1024]{1,0}), f32[8,1024]{1,0:S(1)}, u32[]{:S(2)}) slice-start(%a), slice={[0:8], [0:1024]}
          %e = f32[8,1024]{1,0:S(1)} slice-done(%s)
          ROOT %r = f32[8,1024]{1,0} copy(%e)
        }
        """)
    # The whole array once, then the slice's source and the result.
    assert traffic.count(module).bytes == (64 + 8 + 8) * 4096


def test_kernels_and_buffers_they_update_in_place() -> None:
    module = parse("""
        ENTRY %main (q: f32[8,128], pool: f32[512,128]) -> (f32[8,128], f32[512,128]) {
          %q = f32[8,128]{1,0} parameter(0)
          %pool = f32[512,128]{1,0} parameter(1)
          %empty = f32[8,128]{1,0} custom-call(), custom_call_target="AllocateBuffer"
          ROOT %attend.3 = (f32[8,128]{1,0}, f32[512,128]{1,0}) custom-call(%q, %pool), custom_call_target="tpu_custom_call", output_to_operand_aliasing={{1}: (1, {})}, backend_config={"cost_estimate":{"flops":"77"}}
        }
        """)  # noqa: E501 (one instruction is one line)
    counted = traffic.count(module)
    assert counted.bytes == 2 * 8 * 128 * 4
    assert counted.flops == 77
    assert dict(counted.kernels) == {"attend": 1}
    assert list(counted.assumptions) == ["kernel attend"]


KERNEL = """
ENTRY %main (i: s32[1], x: f32[8,128], w: s8[4,512,128]) -> f32[8,512] {{
  %i = s32[1]{{0}} parameter(0)
  %x = f32[8,128]{{1,0{x}}} parameter(1)
  %w = s8[4,512,128]{{2,1,0}} parameter(2)
  ROOT %product.3 = f32[8,512]{{1,0}} custom-call(%i, %x, %w), custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"reads":"0,4096,65536",
"writes":"{writes}"
}}}}, metadata={{op_name="jit(f)/product"}}, backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":"9"}}}}}}
}}
"""  # noqa: E501 (one instruction is one line)


def test_a_kernel_moves_what_its_metadata_says() -> None:
    """Of each operand, if it is in HBM: here one of four layers of a stack. XLA prints metadata over several lines."""
    counted = traffic.count(parse(KERNEL.format(x="", writes="16384")))
    assert counted.bytes == 4096 + 65536 + 16384
    assert counted.by_operation == {"jit(f)/product": counted.bytes}
    on_chip = traffic.count(parse(KERNEL.format(x=":T(8,128)S(1)", writes="16384")))
    assert on_chip.bytes == 65536 + 16384
    with pytest.raises(hlo.HloError, match="declares 3 reads and 2 writes; it has 3 operands and 1 results"):
        traffic.count(parse(KERNEL.format(x="", writes="16384,1")))


def test_what_a_kernel_moves_depending_on_data_is_asked_for() -> None:
    text = KERNEL.format(x="", writes="16384")
    work = traffic.KernelWork(bytes=1000.0, flops=5.0, why="ten blocks")
    asked = traffic.Assume(kernel=lambda name: work if name == "product" else None)
    counted = traffic.count(parse(text), asked)
    declared = traffic.count(parse(text))
    assert counted.bytes == declared.bytes + 1000
    assert (declared.flops, counted.flops) == (9, 5)
    assert counted.assumptions == {"kernel product": "1,000 bytes besides its dense operands: ten blocks"}


BRANCHES = """
    %cheap (x: f32[1024]) -> f32[1024] {{
      ROOT %x = f32[1024]{{0}} parameter(0)
    }}

    %dear (x: f32[1024]) -> f32[1024] {{
      %x = f32[1024]{{0}} parameter(0)
      ROOT %y = f32[1024]{{0}} negate(%x)
    }}

    ENTRY %main (p: pred[], x: f32[1024]) -> f32[1024] {{
      %p = pred[] parameter(0)
      %x = f32[1024]{{0}} parameter(1)
      ROOT %c = f32[1024]{{0}} conditional(%p, %x, %x), {branches}, metadata={{op_name="jit(f)/cond"}}
    }}
    """


@pytest.mark.parametrize(
    "branches", ["branch_computations={%cheap, %dear}", "true_computation=%dear, false_computation=%cheap"]
)
def test_branches(branches: str) -> None:
    """The most expensive one, unless it is known which one is taken: index 0 is the one for false."""
    module = parse(BRANCHES.format(branches=branches))
    assert traffic.count(module).bytes == 2 * 4096
    taken = traffic.count(module, traffic.Assume(branch=lambda source, op_name: (0, "never asked for")))
    assert taken.bytes == 0
    assert taken.assumptions == {"conditional jit(f)/cond": "branch 0: never asked for"}


def test_operations_are_counted_by_kind() -> None:
    module = parse("""
        %fused (p0: f32[1024]) -> f32[1024] {
          %p0 = f32[1024]{0} parameter(0)
          ROOT %n = f32[1024]{0} negate(%p0)
        }

        ENTRY %main (x: f32[1024], i: s32[]) -> f32[1024] {
          %x = f32[1024]{0} parameter(0)
          %i = s32[] parameter(1)
          %j = s32[] add(%i, %i)
          %f = f32[1024]{0} fusion(%x), kind=kLoop, calls=%fused
          %s = (f32[1024]{0:S(1)}, f32[1024]{0}, u32[]{:S(2)}) copy-start(%f)
          %d = f32[1024]{0:S(1)} copy-done(%s)
          %r = f32[1024]{0} all-reduce(%d), to_apply=%fused
          ROOT %k = f32[1024]{0} custom-call(%r), custom_call_target="tpu_custom_call"
        }
        """)
    assert traffic.count(module).operations == {"fusion": 1, "copy": 1, "collective": 1, "kernel": 1}


def test_what_a_branch_adds() -> None:
    """The difference of two counts of one program: what is in both leaves nothing."""
    module = parse(BRANCHES.format(branches="branch_computations={%cheap, %dear}"))
    with_it, without = (
        traffic.count(module, traffic.Assume(branch=lambda source, op_name, taken=taken: (taken, "asked for")))
        for taken in (1, 0)
    )
    left = with_it.less(without)
    assert (left.bytes, left.operations["fusion"], left.by_operation["negate"]) == (2 * 4096, 1, 2 * 4096)
    assert with_it.less(with_it).bytes == 0 and not with_it.less(with_it).kernels


def test_flops_of_a_batched_product_written_as_a_convolution() -> None:
    """Eight products of [16, 32] with [32, 64]: XLA lays the batch along a dilated spatial dimension."""
    module = parse("""
        ENTRY %main (a: f32[8,16,32], b: f32[8,32,64]) -> f32[8,16,64] {
          %a = f32[8,16,32]{2,1,0} parameter(0)
          %b = f32[8,32,64]{2,1,0} parameter(1)
          ROOT %c = f32[8,16,64]{2,1,0} convolution(%a, %b), window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf
        }
        """)  # noqa: E501 (one instruction is one line)
    main = module.computations["main"]
    assert flops(main, main.instructions["c"]) == 2 * 8 * 16 * 32 * 64


# --- programs of known traffic, compiled for a v5e ------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (x86-64 Linux)")
    return Mesh(np.asarray(chips.devices("v5e:2x2")).reshape(1, 4), ("data", "model"))


def compiled(mesh, fn, *shapes, dtype=jnp.bfloat16, donate=(), specs=None, assume=None) -> traffic.Traffic:
    specs = specs or [P()] * len(shapes)
    args = [
        jax.ShapeDtypeStruct(shape, jnp.int32 if shape == () else dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    text = jax.jit(fn, donate_argnums=donate).lower(*args).compile().as_text()
    return traffic.count(hlo.parse(text), assume or traffic.Assume())


def close(got: float, expected: float) -> bool:
    return abs(got - expected) <= SMALL


def test_matmul(mesh: Mesh) -> None:
    counted = compiled(mesh, lambda x, w: x @ w, (512, 4096), (4096, 8192))
    assert close(counted.bytes, 2 * (512 * 4096 + 4096 * 8192 + 512 * 8192))
    assert counted.flops == 2 * 512 * 4096 * 8192


@pytest.mark.parametrize("form", ["scan", "fori", "dynamic"])
def test_loop_over_stacked_weights(mesh: Mesh, form: str) -> None:
    """Every layer's weights once, whichever way the loop is written; XLA's own count is off by the number of layers."""
    layers, width = 12, 1024

    def scan(x, w):
        return lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, w)[0]

    def fori(x, w):
        return lax.fori_loop(0, layers, lambda i, x: jnp.tanh(x @ w[i]), x)

    def dynamic(x, w, n):
        return lax.fori_loop(0, n, lambda i, x: jnp.tanh(x @ w[i]), x)

    shapes = [(16, width), (layers, width, width), ()]
    fn = {"scan": scan, "fori": fori, "dynamic": dynamic}[form]
    wanted = []

    def assume(source: str, op_name: str) -> tuple[float, str]:
        wanted.append(source.rpartition(".")[2])
        return layers, "all layers"

    shapes = shapes[: 3 if form == "dynamic" else 2]
    counted = compiled(mesh, fn, *shapes, assume=traffic.Assume(loop=assume))
    assert close(counted.bytes, 2 * (layers * width * width + 2 * 16 * width))
    assert counted.flops == layers * 2 * 16 * width * width
    assert wanted == (["dynamic"] if form == "dynamic" else [])


def test_update_in_place(mesh: Mesh) -> None:
    def update(pool, row, at):
        return lax.dynamic_update_slice(pool, row, (at, 0))

    counted = compiled(mesh, update, (4096, 1024), (8, 1024), (), donate=(0,))
    assert close(counted.bytes, 2 * 2 * 8 * 1024)


def test_update_that_is_not_in_place_copies(mesh: Mesh) -> None:
    def update(pool, row, at):
        return lax.dynamic_update_slice(pool, row, (at, 0))

    counted = compiled(mesh, update, (4096, 1024), (8, 1024), ())
    assert close(counted.bytes, 2 * (2 * 4096 * 1024 + 2 * 8 * 1024))


def test_scatter_in_place(mesh: Mesh) -> None:
    def scatter(pool, rows, at):
        return pool.at[at + jnp.arange(8) * 3].set(rows)

    counted = compiled(mesh, scatter, (4096, 1024), (8, 1024), (), donate=(0,))
    assert close(counted.bytes, 2 * 2 * 8 * 1024)


def test_gathered_rows(mesh: Mesh) -> None:
    def gather(table, at):
        return table[at + jnp.arange(32) * 3]

    # Larger than the on-chip memory: a small table would be fetched whole.
    counted = compiled(mesh, gather, (2**17, 1024), ())
    assert close(counted.bytes, 2 * 2 * 32 * 1024)


def test_transpose_is_one_copy(mesh: Mesh) -> None:
    counted = compiled(mesh, lambda x: x.T, (4096, 2048))
    assert close(counted.bytes, 2 * 2 * 4096 * 2048)


def test_conditional_is_its_most_expensive_branch(mesh: Mesh) -> None:
    def either(x, w, at):
        return lax.cond(at > 0, lambda: x @ w, lambda: x * 2)

    counted = compiled(mesh, either, (1024, 1024), (1024, 1024), ())
    assert close(counted.bytes, 3 * 2 * 1024 * 1024)
    assert any(key.startswith("conditional") for key in counted.assumptions)


def test_a_shard_counts_its_part_and_the_collective(mesh: Mesh) -> None:
    def project(x, w):
        return x @ w.T

    specs = [P(), P(None, "model")]
    counted = compiled(mesh, project, (8, 4096), (8192, 4096), specs=specs)
    assert counted.flops == 2 * 8 * 1024 * 8192
    assert counted.collective_bytes == 8 * 8192 * 2
    assert close(counted.bytes, 2 * (8192 * 1024 + 8 * 1024 + 8 * 8192))


def test_a_pallas_kernel_is_found(mesh: Mesh) -> None:
    from jax.experimental import pallas as pl

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def run(x):
        kernel = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="double")
        return jax.shard_map(kernel, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(x)

    counted = compiled(mesh, run, (256, 256))
    assert list(counted.kernels) == ["double"]
    assert close(counted.bytes, 2 * 2 * 256 * 256)


def test_topologies() -> None:
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (x86-64 Linux)")
    assert len(chips.devices("v5e:1x1")) == 1
    assert len(chips.devices("v6e:2x4")) == 8
    with pytest.raises(chips.TopologyError, match="write CHIP:AxB"):
        chips.devices("v9:2x2")
    with pytest.raises(chips.TopologyError, match="v5e:3x3 is refused"):
        chips.devices("v5e:3x3")
