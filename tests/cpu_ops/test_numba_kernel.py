"""numba's kernel: numpy's bits in every dtype and size, wherever a chunk begins."""

from __future__ import annotations

import pytest
import torch

from tests.cpu_ops.reference import HYPER, check_kernel, same_bits, scalars_of
from zoff_async.cpu_ops import ADAM, ADAMW, make_kernel
from zoff_async.cpu_ops.numba_kernel import Shape, loop_text

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def kernel():
    """Compiles a combination of dtypes once for all tests here."""
    return make_kernel("numba", ADAMW)


@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("out", [None, *DTYPES])
def test_one_update_has_numpys_bits_in_every_dtype(kernel, grad, out):
    """With NaN, inf, zeros of both signs and subnormals, in a thread that flushes those and in one that does not."""
    scalars = ADAMW.scalars(**HYPER, factor=0.7)

    for flush in (True, False):
        check_kernel(kernel, scalars, 5000, grad=grad, out=out, flush=flush)


@pytest.mark.parametrize("numel", [1, 2, 15, 16, 31, 32, 33, 511, 512, 513, 1024, 4099])
@pytest.mark.parametrize("offset", [0, 1, 13, 32])
def test_one_update_has_numpys_bits_for_every_size_and_place(kernel, numel, offset):
    """Streamed stores begin at cache lines; a chunk begins anywhere, and its neighbours are not touched."""
    check_kernel(kernel, ADAMW.scalars(**HYPER), numel, offset=offset)


@pytest.mark.parametrize(("numel", "offset"), [(1, 0), (513, 1), (5000, 0), (5000, 7)])
@pytest.mark.parametrize("out", [None, torch.bfloat16])
def test_a_second_buffer_takes_the_new_state_and_the_old_stays(kernel, numel, offset, out):
    check_kernel(kernel, ADAMW.scalars(**HYPER), numel, offset=offset, out=out, in_place=False)


@pytest.mark.parametrize(
    ("rule", "program"),
    [(rule, program) for rule in (ADAMW, ADAM) for program in rule.programs],
    ids=lambda x: getattr(x, "name", x),
)
def test_every_program_of_a_rule_is_numpys_too(rule, program):
    """Without decay, say, an infinite weight makes no NaN of its gradient."""
    scalars = scalars_of(rule, program)

    assert scalars.program == program
    check_kernel(make_kernel("numba", rule), scalars, 3000)


def test_twenty_steps_with_a_changing_factor_have_numexprs_bits(kernel):
    start, found = torch.randn(70_001), []
    for made in (kernel, make_kernel("numexpr", ADAMW)):
        master, state = start.clone(), (torch.zeros_like(start), torch.zeros_like(start))
        grad, out = torch.empty(start.numel(), dtype=torch.float16), torch.empty(start.numel(), dtype=torch.bfloat16)
        update = made.bind(master, state, grad, out)
        generator = torch.Generator().manual_seed(1)
        for step in range(1, 21):
            grad.copy_(torch.randn(start.numel(), generator=generator))
            update.run(ADAMW.scalars(**{**HYPER, "step": step}, factor=(1.0, 0.37)[step % 2]))
        found.append((master, *state, out))

    assert kernel.order == made.order
    for ours, theirs in zip(*found, strict=True):
        assert same_bits(ours, theirs)


def test_the_loop_is_the_rules_own_lines():
    text, signature = loop_text("update", ADAMW.programs["decoupled"], ("m", "v"), Shape("bf16", "bf16", in_place=True))

    assert text == (
        "def update(g_in, p_in, m_in, v_in, w_out, f, c1, b1, c2, b2, s, e, d):\n"
        "    w_block = np.empty(512, np.uint16)\n"
        "    w_head = head_numel(w_out)\n"
        "    for start in range(0, p_in.size, 512):\n"
        "        numel = min(512, p_in.size - start)\n"
        "        g_old = g_in[start : start + numel]\n"
        "        p_old = p_in[start : start + numel]\n"
        "        m_old = m_in[start : start + numel]\n"
        "        v_old = v_in[start : start + numel]\n"
        "        for i in range(numel):\n"
        "            g = widen_bf16(g_old[i])\n"
        "            p = widen_f32(p_old[i])\n"
        "            m = widen_f32(m_old[i])\n"
        "            v = widen_f32(v_old[i])\n"
        "            g = g*f\n"
        "            m = m + (g - m)*c1\n"
        "            v = v*b2 + g*g*c2\n"
        "            p = p*d - m*s/(np.sqrt(v) + e)\n"
        "            p_old[i] = p\n"
        "            m_old[i] = m\n"
        "            v_old[i] = v\n"
        "            w_block[i] = narrow_bf16(p)\n"
        "        stream(w_out, start, w_block, numel, w_head)\n"
        "    fence()\n"
    )
    assert signature == (
        "void(uint16[::1], float32[::1], float32[::1], float32[::1], uint16[::1], "
        "float32, float32, float32, float32, float32, float32, float32, float32)"
    )
