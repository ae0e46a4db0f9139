"""Gluon's Hopper kernels on a CPU: what they compute and how their warps wait for each other, without a GPU.

Each partition of a kernel is a thread; programs run one after the other. TMA copies land at once; what TMA adds to
memory must not change until that has been waited for. A product reads shared memory when it is issued and again when
it is waited for, and what it reads must not have changed in between: a stage that was handed back too early shows.
Layouts, registers and proxies are the compiler's business, not seen here.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr
from triton.runtime.jit import ConstexprFunction, JITFunction

PATIENCE = 20.0  # seconds at one barrier: a deadlock


class Value:
    """A tensor or a scalar of a kernel."""

    def __init__(self, data, dtype=None):
        self.data = torch.as_tensor(data, dtype=dtype)
        self.type = SimpleNamespace(layout=None)
        self.shape, self.dtype = list(self.data.shape), self.data.dtype

    def to(self, dtype, bitcast=False):
        return Value(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def reshape(self, shape):
        return Value(self.data.reshape(shape))

    def permute(self, order):
        return Value(self.data.permute(order))

    def __getitem__(self, key):
        return Value(self.data[key])

    def __index__(self):
        return int(self.data)

    def __bool__(self):
        return bool(self.data)


def _binary(name):
    function = getattr(operator, name)

    def apply(self, other):
        if isinstance(other, Pointer):
            return NotImplemented
        a, b = self.data, _data(other)
        if name in ("floordiv", "mod"):  # the GPU rounds to zero, torch down
            assert (a >= 0).all()
            assert (torch.as_tensor(b) > 0).all()
        return Value(function(a, b))

    return apply


_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift", "xor", "and", "or",
    "lt", "le", "gt", "ge", "eq", "ne",
)  # fmt: skip
for _name in _OPERATORS:
    _function = _binary(_name + "_" if _name in ("and", "or") else _name)
    setattr(Value, f"__{_name}__", _function)
Value.__radd__, Value.__rmul__, Value.__ror__ = Value.__add__, Value.__mul__, Value.__or__
Value.__rtruediv__ = lambda self, other: Value(_data(other) / self.data)
Value.__rsub__ = lambda self, other: Value(_data(other) - self.data)
Value.__hash__ = None


def _data(x):
    return x.data if isinstance(x, Value) else x


class Pointer:
    def __init__(self, memory: torch.Tensor, offset=0):
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + _data(offset))

    __radd__ = __add__


class Shared:
    """A view of shared memory."""

    def __init__(self, data: torch.Tensor):
        self.data, self.dtype = data, data.dtype

    def index(self, i):
        assert 0 <= int(i) < self.data.shape[0]
        return Shared(self.data[int(i)])

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, int(start), int(length)))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def reshape(self, shape):
        return Shared(self.data.view(shape))

    def _reinterpret(self, dtype, shape, layout):
        return Shared(self.data.view(dtype).view(shape))

    def load(self, layout):
        return Value(self.data.clone())

    def store(self, values):
        assert self.data.shape == values.data.shape
        self.data.copy_(values.data)


class Barriers:
    """mbarriers: each counts arrivals and bytes to come, and then its phase ends. Nobody may arrive for the next phase
    before somebody has waited for that one: compute-sanitizer's synccheck asks for the same."""

    def __init__(self, shape):
        self.all = [SimpleNamespace(count=0, arrivals=0, bytes=0, done=0, awaited=0) for _ in range(shape[0])]
        self.changed = threading.Condition()

    def index(self, i):
        assert 0 <= int(i) < len(self.all)
        return self, self.all[int(i)]

    def update(self, one, arrivals, to_come):
        with self.changed:
            assert one.arrivals + arrivals <= one.count, "an arrival too many"
            assert not arrivals or one.awaited == one.done, "an arrival after a phase that nobody has waited for"
            one.arrivals, one.bytes = one.arrivals + arrivals, one.bytes + to_come
            if one.arrivals == one.count and one.bytes == 0:
                one.arrivals, one.done = 0, one.done + 1
                self.changed.notify_all()

    def wait(self, one, phase):
        with self.changed:
            if not self.changed.wait_for(lambda: one.done % 2 != int(phase), PATIENCE):
                raise AssertionError(f"deadlock in {threading.current_thread().name}")
            one.awaited = one.done


def _barrier(b):
    return b if isinstance(b, tuple) else b.index(0)


class Descriptor:
    def __init__(self, host: TensorDescriptor):
        self.memory = torch.as_strided(host.base, host.shape, host.strides, host.base.storage_offset())
        self.block, self.layout, self.dtype = host.block_shape, host.layout, host.base.dtype


def _inside(descriptor, at):
    """Of a descriptor's tile the part that lies in the tensor: where in the tensor, and where in the tile."""
    source, target = [], []
    for start, size, length in zip(map(int, at), descriptor.block, descriptor.memory.shape, strict=True):
        count = max(0, min(size, length - start))
        source.append(slice(start, start + count))
        target.append(slice(0, count))
    return tuple(source), tuple(target)


def _copy(descriptor, at, barrier, result):
    tile = torch.zeros(descriptor.block, dtype=result.data.dtype)  # outside the tensor: zeros
    source, target = _inside(descriptor, at)
    tile[target] = descriptor.memory[source]
    assert result.data.shape == tile.shape
    result.data.copy_(tile)
    owner, one = _barrier(barrier)
    owner.update(one, 0, -tile.numel() * tile.element_size())


def _copy_back(descriptor, at, shared):
    source, target = _inside(descriptor, at)
    descriptor.memory[source] = shared.data[target]


def _same(a, b):
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


class Products(threading.local):
    def __init__(self):
        self.flying = []


class Token(Value):
    """A product under way: nobody may look at it."""

    def __init__(self, compute):
        self.compute, self.issued, self.ready = compute, compute(), False

    def land(self):
        result = self.compute()
        assert _same(result, self.issued), "an operand changed while its product was under way"
        Value.__init__(self, result)
        self.ready = True


_products = Products()


def _mma(a, b, acc, *, use_acc=True, is_async):
    assert is_async
    wide, before, dtype = torch.int64, 0, torch.int32
    if a.dtype.is_floating_point:
        wide, dtype = torch.float64, torch.float32
    if use_acc:  # of a product under way, what it will be
        before = acc.issued if isinstance(acc, Token) and not acc.ready else acc.data
    token = Token(lambda: (before + a.data.to(wide) @ b.data.to(wide)).to(dtype))
    _products.flying.append(token)
    return token


def _mma_wait(outstanding, deps):
    flying = _products.flying
    while len(flying) > outstanding:
        flying.pop(0).land()
    assert all(token.ready for token in deps), "waited for too few products"
    results = tuple(Value(token.data) for token in deps)
    return results if len(results) > 1 else results[0]


def _load(pointer, mask=None, other=0):
    at = torch.as_tensor(pointer.offset)
    if mask is None:
        return Value(pointer.memory[at])
    seen = mask.data.expand(at.shape)
    values = torch.full(at.shape, other, dtype=pointer.memory.dtype)
    values[seen] = pointer.memory[at[seen]]
    return Value(values)


def _store(pointer, values, mask=None):
    at = torch.as_tensor(pointer.offset).expand(values.data.shape)
    seen = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.data.expand(at.shape)
    pointer.memory[at[seen]] = values.data[seen].to(pointer.memory.dtype)


_adding = threading.Lock()
_adds = threading.local()  # of a warpgroup: the tiles under way that it sent to be added, and what they held


def _add(descriptor, at, shared):
    source, target = _inside(descriptor, at)
    with _adding:
        descriptor.memory[source] += shared.data[target]
    under_way = vars(_adds).setdefault("tiles", [])
    under_way.append((shared.data, shared.data.clone()))


def _store_wait(pending):
    under_way = vars(_adds).get("tiles", [])
    while len(under_way) > pending:
        now, sent = under_way.pop(0)
        assert _same(now, sent), "a tile changed while it was being added"


def _assembly(text, constraints, args, dtype, is_pure, pack):
    (x,) = args
    if "lanemask" in text:
        return 0
    return Value(torch.exp2(x.data) if "ex2" in text else 1.0 / x.data)


def _warp_specialize(partitions, warps, registers):
    errors = []

    def run(function, arguments):
        try:
            function(*arguments)
            assert not _products.flying, "a product is under way at the end"
            assert not vars(_adds).get("tiles"), "shared memory is being added at the end"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=p, name=f"partition {i}") for i, p in enumerate(partitions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _allocate(dtype, shape, layout):
    if dtype == torch.int64:
        return Barriers(shape)
    fill = torch.nan if dtype.is_floating_point else 77
    return Shared(torch.full(shape, fill, dtype=dtype))


def _elementwise(function):
    return lambda a, b: Value(function(*(torch.as_tensor(_data(x)) for x in (a, b))))


_LANGUAGE = SimpleNamespace(
    int8=torch.int8, int32=torch.int32, int64=torch.int64, float16=torch.float16,
    float32=torch.float32,
    NVMMADistributedLayout=lambda *_: None, SliceLayout=lambda *_: None, DotOperandLayout=lambda *_: None,
    SwizzledSharedLayout=lambda *_: None, NVMMASharedLayout=lambda *_: None, BlockedLayout=lambda *_: None,
    DistributedLinearLayout=lambda *_: None,
    static_range=range, warp_specialize=_warp_specialize, constexpr=lambda x: x, allocate_shared_memory=_allocate,
    inline_asm_elementwise=_assembly, load=_load, store=_store,
    full=lambda shape, fill, dtype, layout: Value(torch.full(shape, fill, dtype=dtype)),
    reshape=lambda x, shape: x.reshape(shape), permute=lambda x, order: x.permute(order),
    join=lambda a, b: Value(torch.stack([a.data, b.data], -1)),
    expand_dims=lambda x, axis: Value(torch.as_tensor(_data(x)).unsqueeze(axis)),
    sum=lambda x, axis: Value(x.data.sum(axis)), log2=lambda x: Value(x.data.log2()),
    arange=lambda start, end, layout: Value(torch.arange(start, end)),
    zeros=lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=dtype)),
    convert_layout=lambda x, layout, assert_trivial: x,
    max=lambda x, axis: Value(x.data.amax(axis)), min=lambda x, axis: Value(x.data.amin(axis)),
    abs=lambda x: Value(x.data.abs()),
    minimum=_elementwise(torch.minimum), maximum=_elementwise(torch.maximum),
    where=lambda c, a, b: Value(torch.where(*(torch.as_tensor(_data(x)) for x in (c, a, b)))),
    cdiv=lambda a, b: (a + (b - 1)) // b,
)  # fmt: skip


def _expect(barrier, size):
    owner, one = _barrier(barrier)
    owner.update(one, 1, int(size))


def _arrive(barrier):
    _expect(barrier, 0)


def _wait(barrier, phase):
    owner, one = _barrier(barrier)
    owner.wait(one, phase)


def _init(barrier, count):
    _barrier(barrier)[1].count = count


def _follow(peak, anchor, slack):
    highest = peak.data.amax(1, keepdim=True)
    new = torch.where(highest > anchor.data + slack, highest, anchor.data)
    return Value(new), Value(torch.where(new == anchor.data, 1.0, torch.exp2(anchor.data - new)))


_MBARRIER = SimpleNamespace(MBarrierLayout=lambda: None, init=_init, wait=_wait, expect=_expect, arrive=_arrive)
_TMA = SimpleNamespace(
    async_copy_global_to_shared=_copy, async_copy_shared_to_global=_copy_back, store_wait=_store_wait
)
_REPLACED = {
    "gl": _LANGUAGE, "mbarrier": _MBARRIER, "tma": _TMA, "async_add_shared_to_global": _add,
    "fence_async_shared": lambda: None, "barrier": lambda: None,
    "warpgroup_mma": _mma, "warpgroup_mma_wait": _mma_wait,
    "left_16_bit": lambda x, acc, dtype: x.to(dtype), "in_16_bit": lambda x, dtype: x.to(dtype),
    "_slack": lambda dtype: 8.0,
    "follow": _follow, "rescale": lambda x, factor, acc, d: Value(x.data * factor.data[:, :1]),
    "rescale_rows": lambda x, factor, d: x * factor,
    "widen": lambda x, d: x, "wide_rows": lambda d: None,
}  # fmt: skip


class _Kernel:
    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        def launch(*args, num_warps, **constants):
            with contextlib.ExitStack() as stack:
                for module in _MODULES:
                    stack.enter_context(_patched(module))
                _LANGUAGE.num_programs = lambda axis: grid[0]
                for pid in range(grid[0]):
                    _LANGUAGE.program_id = lambda axis, pid=pid: Value(pid)
                    self.function(*map(_argument, args), **constants)

        return launch


def _argument(x):
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    if isinstance(x, torch.Tensor):
        return Pointer(
            torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,))
        )
    if x is None:
        return None
    return Value(x, torch.float32 if isinstance(x, float) else torch.int64)


_MODULES: list[ModuleType] = []


@contextlib.contextmanager
def _patched(module: ModuleType) -> Iterator[None]:
    """The device functions of a module as plain ones, which use the stand-ins above."""
    before = dict(vars(module))
    for name, value in before.items():
        if name in _REPLACED:
            setattr(module, name, _REPLACED[name])
        elif isinstance(value, JITFunction | ConstexprFunction):
            setattr(module, name, value.fn)
        elif isinstance(value, constexpr):
            setattr(module, name, value.value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def call(module: ModuleType, name: str, *args):
    """A device function of `module` by itself; a tensor is in memory, a Value in registers."""
    with _patched(module):
        return getattr(module, name)(*(x if isinstance(x, Value) else _argument(x) for x in args))


@contextlib.contextmanager
def on_cpu(launcher: ModuleType, *device_modules: ModuleType) -> Iterator[None]:
    """In `launcher`, kernels of `device_modules` run here."""
    before = dict(vars(launcher))
    _MODULES[:] = device_modules
    for name, value in before.items():
        if isinstance(value, JITFunction) and name.startswith("hopper"):
            setattr(launcher, name, _Kernel(value.fn))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(launcher, name, value)
