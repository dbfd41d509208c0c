"""AdaComp (Chen et al., AAAI 2018, arXiv 1712.02679) and wire format version 1 in plain torch: the
specification of `adacomp_torch.ops`, slow and unchecked. Algorithm 2, for each rank and parameter:

    (1) G = residual + dW                           dW: this rank's gradient of the parameter
    (2) H = G + (threshold_factor - 1) dW           the paper's factor is 2
    (3) g_max(i) = max |G(j)| over bin i            a bin: bin_size consecutive elements
    (4) s = mean of g_max over the bins             scale="bin": s(i) = g_max(i) on a coarse grid
    (5) send j of bin i iff g_max(i) > 0 and |H(j)| >= g_max(i) and G(j) != 0
    (6) G_q(j) = sign(G(j)) s if j is sent, else 0
    (7) residual = G - G_q
    (8) gradient for the optimiser = mean of G_q over the ranks
"""

import struct
from itertools import accumulate

import torch
from torch import Tensor, split
from torch.nn.functional import pad

HEADER = "<4sHHIIQQ"  # magic, version, flags, layout hash, step, needed bytes, used bytes
FORMAT, FLAGS = (b"ADC1", 1), {"layer": 0, "bin": 1}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # the position is the code in the hash
SECTION, RANGE = 16, 2  # bytes: sections, and a chunk's codes and entries, fill multiples of these
NARROW, WIDE = (torch.uint8, 63), (torch.uint16, 16383)  # entries; the last index: "sends nothing"
CHUNK_ELEMENTS = 4096  # a chunk is as many whole bins as fit into this, but at least one
LANES = 32  # partial sums of (4), so that every device adds in the same order
SHIFT, BIAS = 22, 54  # code of a bin's scale: the exponent and one mantissa bit of g_max, less BIAS
GRID = (torch.arange(256, dtype=torch.int32) + BIAS << SHIFT | 1 << SHIFT - 1).view(torch.float32)
SPREAD, FNV_BASIS, FNV_PRIME = 2654435761, 0x811C9DC5, 0x01000193


def layout_hash(layout: Tensor, dtype: torch.dtype, scale: str, threshold_factor: float) -> int:
    """FNV-1a 32 of what both ends must agree on; `layout` [segments, 4] int64, `dtype` of grad."""
    fields = [len(layout), *layout[:, 1:3].flatten().tolist(), DTYPES.index(dtype), FLAGS[scale]]
    value = FNV_BASIS
    for byte in struct.pack(f"<{len(fields)}qfi", *fields, threshold_factor, 0):
        value = (value ^ byte) * FNV_PRIME % 2**32
    return value


def compress(grad: Tensor, residual: Tensor, layout: Tensor, payload: Tensor, *, step: int = 0,
             scale: str = "layer", threshold_factor: float = 2.0) -> None:  # fmt: skip
    """Updates `residual` [any] float32 and writes `payload` [capacity] uint8; reads `grad` [numel]
    float32, float16 or bfloat16 and `layout` [segments, 4] int64: bucket_offset, numel, bin_size
    (0: raw), residual_offset. In chunks that do not fit the residual becomes G."""
    segments, fixed = _plan(layout)
    words, raw, ranges, undo = [0.0] * len(segments), b"", [], []
    for i, (offset, numel, bin_size, residual_offset, n) in enumerate(segments):
        dw = grad[offset:][:numel].float()
        if bin_size == 0:
            if grad.dtype == torch.float16:  # exact NaN bits: float() differs with the length
                half = grad[offset:][:numel].view(torch.int16).int()
                nan = (half & -(2**31) | 0x7F800000 | (half & 0x3FF) << 13).view(torch.float32)
                dw = torch.where(dw.isnan(), nan, dw)
            raw += bytes(dw.view(torch.uint8).tolist())
        elif numel > 0:
            kept = residual[residual_offset:][:numel]
            g = kept + dw  # (1)
            h = g + (torch.tensor(threshold_factor) - 1) * dw  # (2)
            words[i], g_q, parts = _encode(dw, g, h, bin_size, n, scale == "layer", grad.dtype)
            kept.copy_(torch.where(g.isfinite(), g - g_q, kept))  # (7); never becomes inf or NaN
            undo += [*zip(split(kept, n * bin_size), split(g, n * bin_size), strict=True)]
            ranges += parts
    needed, room = fixed.size + sum(map(len, ranges)), len(payload) - fixed.size
    start = (step * SPREAD % 2**32) * len(ranges) >> 32  # another every step, so that none starves
    for at in (*range(start, len(ranges)), *range(start)):
        if len(ranges[at]) > room:  # the first that does not fit ends it
            undo[at][0].copy_(undo[at][1])
            ranges[at], room = b"", 0
        room -= len(ranges[at])
    ends = [*accumulate(map(len, ranges), initial=0)]
    tag, used = layout_hash(layout, grad.dtype, scale, threshold_factor), fixed.size + ends[-1]
    data = fixed.pack(*FORMAT, FLAGS[scale], tag, step % 2**32, needed, used, *words, *ends, raw)
    payload.zero_()[:used] = torch.frombuffer(bytearray(data + b"".join(ranges)), dtype=torch.uint8)


def decompress(payloads: Tensor, grad: Tensor, layout: Tensor, *, step: int = 0,
               scale: str = "layer", threshold_factor: float = 2.0) -> None:  # fmt: skip
    """(8): writes `grad` [numel] from `payloads` [world_size, capacity] uint8, in rank order.
    `step` and `threshold_factor` serve the checks of the fast path; nothing is checked here."""
    (segments, fixed), total = _plan(layout), torch.zeros(len(grad))
    for payload in payloads:
        *fields, raw = fixed.unpack(bytes(payload[: fixed.size].tolist()))[7:]  # after the header
        ends = [fixed.size + end for end in reversed(fields[len(segments) :])]
        for word, (offset, numel, bin_size, _, n) in zip(fields, segments, strict=False):  # scales
            segment, kind = total[offset:][:numel], NARROW[0] if bin_size <= NARROW[1] else WIDE[0]
            if bin_size == 0:
                segment += torch.tensor(struct.unpack_from(f"<{numel}f", raw))
                raw = raw[4 * numel :]
                continue
            segment += 0.0 * word  # NaN reaches the whole parameter
            for chunk in split(segment, n * bin_size) if numel > 0 else ():
                part, bins = payload[ends.pop() : ends[-1]], -(-len(chunk) // bin_size)
                s, sending = torch.full((bins,), word), torch.arange(bins)
                if scale == "bin":
                    codes, part = part[:bins].long(), part[bins + -bins % RANGE :]
                    s, sending = _rounded(GRID[codes], grad.dtype), codes.nonzero().view(-1)
                entries = part.view(kind).long()
                number = (entries & 1).cumsum(0) - (entries & 1)  # of its bin among those sending
                real = (number < len(sending)) & (entries >> 2 < bin_size)  # no padding, no marker
                at, entries = sending[number[real]], entries[real]
                chunk.index_add_(0, at * bin_size + (entries >> 2), s[at] * (1 - (entries & 2)))
    mean = total / torch.full_like(total, len(payloads))  # x / number may become x * (1 / number)
    grad.copy_(mean).masked_fill_(mean.isnan(), float("nan"))  # one NaN, whichever made it


def _plan(layout: Tensor) -> tuple[list[tuple[int, ...]], struct.Struct]:
    """Layout rows, each with the bins of its chunks; the fields before the entries, padding too."""
    segments = [(*row, max(1, CHUNK_ELEMENTS // max(1, row[2]))) for row in layout.tolist()]
    chunks = sum(-(-numel // (n * bin_size)) for _, numel, bin_size, _, n in segments if bin_size)
    s, e, r = len(segments), chunks + 1, 4 * sum(row[1] for row in segments if row[2] == 0)
    fill = [f"{-size % SECTION}x" for size in (4 * s, 4 * e, r)]
    return segments, struct.Struct(f"{HEADER}{s}f{fill[0]}{e}I{fill[1]}{r}s{fill[2]}")


def _encode(dw: Tensor, g: Tensor, h: Tensor, bin_size: int, n: int, layer: bool,
              dtype: torch.dtype) -> tuple[float, Tensor, list[bytes]]:  # fmt: skip
    """(3) to (6) of a parameter: its scale on the wire, G_q [numel], the ranges of its chunks."""
    numel, finite = len(g), bool(g.isfinite().all())
    dw, g, h = (pad(x, (0, -numel % bin_size)).view(-1, bin_size) for x in (dw, g, h))
    g_max = g.abs().amax(1)  # (3)
    sums = torch.stack([_ordered_sum(chunk) for chunk in split(g_max.double(), n)])
    codes = ((g_max.view(torch.int32) >> SHIFT) - BIAS).clamp(1, 255)
    s = (_ordered_sum(sums) / len(g_max)).float() if layer else GRID[codes]
    s = _rounded(s, dtype).expand_as(g_max)  # (4)
    sends = finite & (dw.any() if layer else dw.any(1)) & (g_max > 0) & (s > 0)  # not if dW = 0
    sent = sends[:, None] & (h.abs() >= g_max[:, None]) & (g != 0)  # (5)
    g_q = torch.where(sent, g.sign() * s[:, None], 0.0)  # (6)
    word = float((s * sends).amax() if layer else sent.any()) if finite else float("nan")
    ranges, (kind, marker) = [], NARROW if bin_size <= NARROW[1] else WIDE
    for q, c in zip(split(g_q, n), split(codes * sent.any(1), n), strict=True):
        at, index = torch.cat((q, (c == 0)[:, None] & layer), 1).nonzero(as_tuple=True)
        entries = torch.where(index == bin_size, marker, index) << 2
        entries |= (pad(q, (0, 1))[at, index] < 0) << 1 | (at.diff(append=at.new_tensor([-1])) != 0)
        parts = c[: 0 if layer else len(c)].to(torch.uint8), entries.to(kind).view(torch.uint8)
        data = torch.cat([pad(part, (0, -len(part) % RANGE)) for part in parts])
        ranges.append(bytes(data.tolist()) if word > 0 else b"")
    return word, g_q.view(-1)[:numel], ranges


def _ordered_sum(terms: Tensor) -> Tensor:
    """Lane l adds terms l, l + 32, ... of `terms` [any] float64, then the lanes add in pairs."""
    lanes = pad(terms, (0, -len(terms) % LANES)).view(-1, 2, 2, 2, 2, 2).cumsum(0)[-1]
    return lanes.sum(0).sum(0).sum(0).sum(0).sum(0)  # at distance 16, 8, 4, 2, 1


def _rounded(s: Tensor, dtype: torch.dtype) -> Tensor:  # what is sent is what arrives, never inf
    return s.clamp(max=torch.finfo(dtype).max).to(dtype).float()
