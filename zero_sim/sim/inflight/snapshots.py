"""Snapshots of the memory that a rank lends to an operation, from the issue until the wait returns.

At the issue, inputs are copied and outputs are poisoned. The operation works on the copies. Before
each access, the real memory is compared with its expected content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zero_sim.sim.call import Call
from zero_sim.sim.failures import Changed, InFlightRace, LentMemory
from zero_sim.sim.in_flight_buffers import InFlightBuffer, InFlightBuffers, Role
from zero_sim.sim.inflight.poison import bits_of, is_poison, poison, poison_of
from zero_sim.sim.roles import (
    read_tensors,
    repeated_outputs,
    span_bytes,
    undefined_outputs,
    written_parts,
    written_tensors,
)
from zero_sim.sim.shared_memory import shared_elems

_WAIT_FIRST = "Wait for the operation before the program touches this memory, or give it a copy."


def buffers_of(
    call: Call, *, what: str, group_rank: int, group_size: int, strict: bool
) -> list[InFlightBuffer]:
    """Return a call's memory as buffers. Memory that is both read and written is an output.

    `what` names the operation, such as `all_gather #3 of group world`. If `strict`, memory that
    several outputs share becomes undefined.
    """
    written = [tensor.detach() for tensor in written_tensors(call, group_rank=group_rank)]
    parts = written_parts(call, group_rank=group_rank, group_size=group_size)
    read = read_tensors(call, group_rank=group_rank)
    inputs = [] if _in_place(call, group_rank) else [tensor.detach() for tensor in read]
    undefined = undefined_outputs(call) if strict else set()
    # (role, tensor, whole tensor, undefined)
    given: list[tuple[Role, Tensor, Tensor, bool]] = [
        *(("input", tensor, tensor, False) for tensor in inputs),
        *(
            ("output", part.of(written), written[part.tensor], part.tensor in undefined)
            for part in parts
        ),
    ]
    return [
        InFlightBuffer(
            role=role,
            tensor=tensor,
            what=what,
            file=call.file,
            line=call.line,
            whole=whole,
            undefined=is_undefined,
        )
        for role, tensor, whole, is_undefined in given
        # Empty tensors have no memory to watch.
        if tensor.numel()
    ]


def _in_place(call: Call, group_rank: int) -> bool:
    """Return True if the operation writes into its inputs."""
    return written_tensors(call, group_rank=group_rank) is call.inputs


# [Note: expected content] An input that shares no memory with an output must stay equal to its
# copy. An output must be poison until it is written, then the result. An input that overlaps an
# output changes with each of our writes, so it is copied again after each.
class BufferSnapshots:
    """Copies and expected content of the memory that a rank lends to an operation.

    `others` are the rank's buffers already in flight. For the other arguments, see `buffers_of`.

    Raises:
        InFlightRace: The call writes memory of an operation in flight, or uses memory that such an
            operation writes.
    """

    def __init__(
        self,
        call: Call,
        *,
        rank: int,
        what: str,
        group_rank: int,
        group_size: int,
        others: InFlightBuffers,
        strict: bool,
    ) -> None:
        self.rank = rank
        self.buffers = buffers_of(
            call, what=what, group_rank=group_rank, group_size=group_size, strict=strict
        )
        _check_free(self.buffers, others, rank=rank)
        # Before the outputs are poisoned, because inputs may overlap them.
        self.copied = _copied_call(call, group_rank=group_rank)
        parts = written_parts(call, group_rank=group_rank, group_size=group_size)
        results = written_tensors(self.copied, group_rank=group_rank)
        self._results = [part.of(results) for part in parts]
        self._outputs = [buffer for buffer in self.buffers if buffer.role == "output"]
        self._inputs = [buffer for buffer in self.buffers if buffer.role == "input"]
        # If a storage has another address later, the program freed or resized it.
        self._addresses = {
            id(buffer): buffer.tensor.untyped_storage().data_ptr() for buffer in self.buffers
        }
        self._aliasing = [
            any(shared_elems(buffer.tensor, output.tensor) for output in self._outputs)
            for buffer in self._inputs
        ]
        # The inputs' expected content, see [Note: expected content].
        copies = [copy for copy in self.copied.inputs if copy.numel()]
        self._images = copies[: len(self._inputs)]
        self._written = False
        for buffer in self._outputs:
            poison(buffer.tensor)
        self._renew_images()

    def check_inputs(self) -> None:
        """Compare the inputs' memory with its expected content.

        Raises:
            InFlightRace: It changed, or it was freed.
        """
        for buffer, image in zip(self._inputs, self._images, strict=True):
            self._check_storage(buffer)
            _check_equal(
                buffer, bits_of(image), f"{buffer.what} changed between issue and wait", self.rank
            )

    def check_outputs(self) -> None:
        """Compare the outputs' memory with poison or, after the write, with the result.

        Raises:
            InFlightRace: The program wrote it, or it was freed.
        """
        for buffer, result in zip(self._outputs, self._results, strict=True):
            # First, because freed memory must not be read.
            self._check_storage(buffer)
            _check_equal(
                buffer,
                bits_of(result) if self._written else None,
                f"{buffer.what} was written by the program while in flight",
                self.rank,
            )

    def write(self) -> None:
        """Write the result into the rank's memory, after `check_inputs` and `check_outputs`."""
        for buffer, result in zip(self._outputs, self._results, strict=True):
            bits_of(buffer.tensor).copy_(bits_of(result))
        self._written = True
        self._renew_images()

    def forget(self) -> None:
        """Release all memory, after the landing."""
        self.copied = replace(self.copied, inputs=(), outputs=())
        self._results, self._outputs, self._inputs = [], [], []
        self._images, self._aliasing = [], []

    def _renew_images(self) -> None:
        for i, aliasing in enumerate(self._aliasing):
            if aliasing:
                self._images[i] = _copy(self._inputs[i].tensor)

    def _check_storage(self, buffer: InFlightBuffer) -> None:
        storage = buffer.tensor.untyped_storage()
        needed = span_bytes(buffer.tensor)[1]
        if storage.nbytes() >= needed and storage.data_ptr() == self._addresses[id(buffer)]:
            return
        raise _race(
            buffer,
            f"storage of the {buffer.role} of {buffer.what} was resized or freed while in flight",
            rank=self.rank,
            detail=f"needs {needed} bytes at the address of the issue, "
            f"but the storage has {storage.nbytes()} bytes now, or moved",
        )


def _copied_call(call: Call, *, group_rank: int) -> Call:
    """Return the call on copies of its inputs, and on new memory for its outputs."""
    if read_tensors(call, group_rank=group_rank) is call.inputs:
        inputs = [_copy(tensor) for tensor in call.inputs]
    else:
        # In a broadcast, members other than the root only receive.
        inputs = [_fresh(tensor) for tensor in call.inputs]
    outputs = [_fresh(tensor) for tensor in call.outputs]
    # If outputs repeat a tensor, their copies must too.
    for index, first in repeated_outputs(call).items():
        outputs[index] = outputs[first]
    return replace(call, inputs=inputs, outputs=outputs)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _fresh(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _check_free(buffers: Sequence[InFlightBuffer], others: InFlightBuffers, *, rank: int) -> None:
    for other in others:
        for buffer in buffers:
            # Two operations may read the same memory.
            if "output" not in (buffer.role, other.role):
                continue
            if shared_elems(buffer.tensor, other.tensor) is not None:
                raise _race(
                    buffer,
                    f"{buffer.what} was issued on memory that {other.what} has in flight",
                    rank=rank,
                    detail=f"{buffer.role} of this operation, and {other.role} of the other, "
                    f"which was issued at {other.site} and not waited for",
                )


def _check_equal(buffer: InFlightBuffer, image: Tensor | None, what: str, rank: int) -> None:
    """Compare memory with the bits of an image, or with poison if `image` is None."""
    # Compare bits, because NaNs and signed zeros must be equal too.
    bits = bits_of(buffer.tensor)
    if image is None:
        good = is_poison(bits, buffer.tensor.dtype)
        # Fast path for the common case.
        if bool(good.all()):
            return
    elif torch.equal(bits, image):
        return
    else:
        good = bits == image
    wrong = (~good).reshape(-1).nonzero()
    index = int(wrong[0])
    new_bits = _unsigned(bits.reshape(-1)[index])
    if image is None:
        old_bits = poison_of(buffer.tensor.dtype)
    else:
        old_bits = _unsigned(image.reshape(-1)[index])
    # 2 for complex elements.
    per_element = bits.numel() // buffer.tensor.numel()
    raise _race(
        buffer,
        f"{buffer.role} of {what}",
        rank=rank,
        detail=f"element {index // per_element} of {buffer.tensor.numel()} was "
        f"{_shown(old_bits, buffer.tensor.dtype, poisoned=image is None)} and is "
        f"{_shown(new_bits, buffer.tensor.dtype)}; {len(wrong)} changed in total",
        changed=Changed(
            index=index // per_element, count=len(wrong), old_bits=old_bits, new_bits=new_bits
        ),
    )


def _race(
    buffer: InFlightBuffer,
    what: str,
    *,
    rank: int,
    detail: str,
    changed: Changed | None = None,
) -> InFlightRace:
    return InFlightRace(
        what,
        rank=rank,
        memory=LentMemory(
            operation=buffer.what,
            site=buffer.site,
            dtype=str(buffer.tensor.dtype).removeprefix("torch."),
            shape=tuple(buffer.tensor.shape),
        ),
        detail=detail,
        hint=_WAIT_FIRST,
        changed=changed,
    )


def _unsigned(word: Tensor) -> int:
    return int(word) % (1 << 8 * word.element_size())


def _shown(bits: int, dtype: torch.dtype, *, poisoned: bool = False) -> str:
    """Format bits in hexadecimal, with their value as a number."""
    dtype = dtype.to_real() if dtype.is_complex else dtype
    if poisoned:
        return f"0x{bits:0{2 * dtype.itemsize}x} (poison)"
    raw = torch.tensor(list(bits.to_bytes(dtype.itemsize, "little")), dtype=torch.uint8)
    value = raw.view(dtype)
    # Python cannot convert 8-bit floats, so widen them to fp32.
    number = value.float().item() if dtype.itemsize == 1 else value.item()
    return f"0x{bits:0{2 * dtype.itemsize}x} ({number})"
