"""Softmax's scores as the left operand of the next product, in registers, and other pieces written in PTX."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def exp2(x):
    """One instruction: results below 2^-126 become 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def bytes_of_127(p):
    """round(127 p) to nearest even, for p in [0, 1]: four neighbours become the four bytes of one register. 127 p + 1.5
    2^23 has the integer in its lowest byte."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 a, b, c, d;
        .reg .b32 x, y;
        fma.rn.f32 a, $1, 0f42FE0000, 0f4B400000;
        fma.rn.f32 b, $2, 0f42FE0000, 0f4B400000;
        fma.rn.f32 c, $3, 0f42FE0000, 0f4B400000;
        fma.rn.f32 d, $4, 0f42FE0000, 0f4B400000;
        prmt.b32 x, a, b, 0x0040;
        prmt.b32 y, c, d, 0x0040;
        prmt.b32 $0, x, y, 0x5410;
        }""",
        "=r,f,f,f,f",
        [p],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def left_operand(p, acc: gl.constexpr, K: gl.constexpr):
    """round(127 p), p [64, K] as a product left it, as the left operand of a product accumulated in layout `acc`.

    No data moves: a thread's columns take the places that its bytes have in the operand, so that column n = 8b + 2t + e
    of each 16 stands at 4t + 2b + e. The right operand has its rows in that order (`common.fragment_order`).
    """
    p = gl.reshape(p, [64, K // 16, 2, 4, 2])
    p = gl.reshape(gl.permute(p, [0, 1, 3, 2, 4]), [64, K])
    return bytes_of_127(gl.convert_layout(p, gl.DotOperandLayout(0, acc, 4), assert_trivial=True))


@gluon.jit
def left_16_bit(x, acc: gl.constexpr, DTYPE: gl.constexpr):
    """x [64, K] in FP32 as a product left it, rounded to DTYPE, as the left operand of a product accumulated in layout
    `acc`. No data moves."""
    return in_16_bit(gl.convert_layout(x, gl.DotOperandLayout(0, acc, 2), assert_trivial=True), DTYPE)


@gluon.jit
def in_16_bit(x, DTYPE: gl.constexpr):
    """FP32 rounded to DTYPE, neighbours into one register: `x.to(DTYPE)` packs them afterwards."""
    if DTYPE.is_bf16():
        rounded = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        rounded = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return rounded


@gluon.constexpr_function
def _follow_text(slack):
    """Outputs 0, 1: anchors of a thread's two rows; 2, 3: what to keep. Inputs 4, 5: its peaks; 6, 7: anchors."""
    bits = f"{(126 + int(slack).bit_length()) << 23:08X}"  # of a power of two
    text = "{ .reg .pred p, q, any; .reg .f32 x, y, t; "
    text += f"add.f32 x, $6, 0f{bits}; add.f32 y, $7, 0f{bits}; setp.gt.f32 p, $4, x; setp.gt.f32 q, $5, y; "
    text += "or.pred any, p, q; mov.f32 $0, $6; mov.f32 $1, $7; mov.f32 $2, 0f3F800000; mov.f32 $3, 0f3F800000; "
    text += "vote.sync.any.pred any, any, 0xffffffff; @!any bra.uni DONE; "
    for peak, bound, old, new, keep, rises in (("$4", "x", "$6", "$0", "$2", "p"), ("$5", "y", "$7", "$1", "$3", "q")):
        for distance in (1, 2):
            source = peak if distance == 1 else new
            text += f"shfl.sync.bfly.b32 t, {source}, {distance}, 0x1f, 0xffffffff; max.f32 {new}, {source}, t; "
        text += f"setp.gt.f32 {rises}, {new}, {bound}; selp.f32 {new}, {new}, {old}, {rises}; "
        text += f"sub.f32 t, {old}, {new}; @{rises} ex2.approx.ftz.f32 {keep}, t; "
    return text + "DONE: }"


@gluon.jit
def follow(peak, anchor, SLACK: gl.constexpr):
    """The rows' anchors [64, 4], and what to keep [64, 4] of sums that were relative to the old ones: 1 where an anchor
    stays. peak [64, 4]: of what each thread has of a row. A row's peak becomes its anchor if it is more than SLACK
    higher; nearly always none of a warp's is, and then its threads exchange nothing."""
    return gl.inline_asm_elementwise(
        _follow_text(SLACK), "=&f,=&f,=&f,=&f,f,f,f,f", [peak, anchor],
        dtype=(gl.float32, gl.float32), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.constexpr_function
def _rescale_text(count):
    x, y = 2 * count, 2 * count + 2  # the factors of a thread's two rows, among `count` that are alike
    products = " ".join(f"mul.f32 ${i}, ${i}, ${y if i // 2 % 2 else x};" for i in range(count))
    return (
        "{ .reg .pred p, q; "
        f"setp.neu.f32 p, ${x}, 0f3F800000; setp.neu.f32 q, ${y}, 0f3F800000; or.pred p, p, q; "
        f"vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni DONE; {products} DONE: }}"
    )


@gluon.constexpr_function
def _rescale_operands(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescale(x, factor, acc: gl.constexpr, D: gl.constexpr):
    """x [64, D] in layout `acc` by factor [64, 4], a row's for each of the threads that have some of it: skipped where
    all rows of a warp have 1, as nearly always."""
    own = gl.permute(gl.reshape(gl.zeros([64, D], gl.float32, acc), [64, D // 8, 4, 2]), [0, 2, 1, 3])
    factor = gl.convert_layout(factor, gl.SliceLayout(2, gl.SliceLayout(3, own.type.layout)), assert_trivial=True)
    factor = gl.permute(gl.expand_dims(gl.expand_dims(factor, 2), 3) + own, [0, 2, 1, 3])
    factor = gl.convert_layout(gl.reshape(factor, [64, D]), acc, assert_trivial=True)
    return rescale_rows(x, factor, D)


@gluon.jit
def rescale_rows(x, factor, D: gl.constexpr):
    """x by factor, both [64, D] in the layout of a product, the same for a row."""
    return gl.inline_asm_elementwise(
        _rescale_text(D // 2), _rescale_operands(D // 2), [x, factor], dtype=gl.float32, is_pure=True, pack=D // 2
    )


@gluon.constexpr_function
def wide_rows(d):
    """Layout of [64, d]: a thread has the rows that it has of a product, but eight neighbouring columns of them."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *([0, 32 << i] for i in range((d // 32).bit_length() - 1))]
    threads = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, threads, [[16, 0], [32, 0]], [], [64, d])


@gluon.constexpr_function
def _exchange_text(count):
    """Of each four registers and each four threads: thread t's register b for thread b's register t."""
    text = "{ .reg .pred p, q; .reg .b32 s; mov.u32 s, %laneid; and.b32 s, s, 1; setp.ne.b32 p, s, 0; "
    text += "mov.u32 s, %laneid; and.b32 s, s, 2; setp.ne.b32 q, s, 0; "
    for i in range(0, count, 4):
        for odd, distance, pairs in (("p", 1, ((0, 1), (2, 3))), ("q", 2, ((0, 2), (1, 3)))):
            for low, high in pairs:
                x, y = f"${i + low}", f"${i + high}"
                text += f"selp.b32 s, {x}, {y}, {odd}; shfl.sync.bfly.b32 s, s, {distance}, 0x1f, 0xffffffff; "
                text += f"selp.b32 {x}, s, {x}, {odd}; selp.b32 {y}, {y}, s, {odd}; "
    return text + "}"


@gluon.constexpr_function
def _exchange_operands(count):
    return ",".join(["=r"] * count + [str(i) for i in range(count)])


@gluon.jit
def widen(x, D: gl.constexpr):
    """x [64, D] of 16 bit, as a product left it, in the layout `wide_rows`: a thread then stores 16 bytes at a time
    instead of 4. Threads exchange registers; shared memory is not needed."""
    x = gl.permute(gl.reshape(x, [64, D // 32, 4, 4, 2]), [0, 1, 3, 2, 4])
    x = gl.convert_layout(gl.reshape(x, [64, D]), wide_rows(D), assert_trivial=True)
    return gl.inline_asm_elementwise(
        _exchange_text(D // 4), _exchange_operands(D // 4), [x], dtype=x.dtype, is_pure=True, pack=D // 2
    )
