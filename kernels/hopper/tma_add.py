"""Adding to memory by TMA, which Triton's compiler knows and Gluon's Hopper module does not name."""

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin


@builtin
def async_add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """Adds a tile in shared memory to the descriptor's tensor at `coord`, each element in one piece and in no order.

    As `tma.async_copy_shared_to_global`: what was stored to `src` before is fenced by `fence_async_shared`, and `src`
    may change after `tma.store_wait`.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)
