"""What codecs do to learning: the character model, AdamW, sync, some groups, in one process.

    python -m tests.benchmarks.codec_quality [--steps 200] [--codecs none int8 int4/sign]

Gradients of each group go through psdist's own encoder with its residuals, are decoded and meaned
as servers do, AdamW steps x, and what has changed of x^ goes back through the pull codec. Printed
are bits per character on text that was not trained on, of x, and against the first codec; and how
many times fewer bytes were sent. `-f` behind a codec is without feedback of pushes.
"""

from __future__ import annotations

import argparse

import torch

from psdist.codecs.chunks import ChunkCoding, ChunkCodings, Form
from psdist.codecs.feedback import PushEncoder, PushTerms
from psdist.codecs.layout import Layouts
from psdist.codecs.named import codec_of
from psdist.codecs.raw import Raw
from psdist.codecs.seeds import ANY_SERVER, seed_of
from psdist.config.codec_specs import CodecSpec
from psdist.config.combinations import parse_both
from psdist.config.settings import RunConfig
from psdist.examples import chars
from psdist.protocol.memory import allocate
from psdist.protocol.partition import Partition, Piece

EXACT = RunConfig().codec_exact


def flat(tensors: list[torch.Tensor], partition: Partition) -> torch.Tensor:
    (chunk,) = partition.chunks
    values = torch.zeros(chunk.length)
    for segment, tensor in zip(chunk.segments, tensors, strict=True):
        values[segment.offset : segment.offset + segment.length] = tensor.detach().reshape(-1)
    return values


def coding_of(spec: CodecSpec, partition: Partition, *, has_feedback: bool) -> ChunkCodings | None:
    codec = codec_of(spec, has_feedback=has_feedback)
    if isinstance(codec, Raw):
        return None
    return ChunkCodings(Layouts(codec, partition, patterns=() if spec.is_cast else EXACT))


def train(text: str, args: argparse.Namespace, data: tuple[chars.Text, chars.Text]) -> None:
    has_feedback = not text.endswith("-f")
    push, pull = parse_both(text.removesuffix("-f"))
    torch.manual_seed(args.seed)
    model = chars.CharTransformer(width=args.width)
    parameters = list(model.parameters())
    pieces = [
        Piece(name=name, shape=tuple(each.shape), stride=(1,), dtype="float32", optimizer_group=0)
        for name, each in model.named_parameters()
    ]
    partition = Partition.cut(pieces, chunk_bytes=256 << 20)
    (chunk,) = partition.chunks
    pushes = coding_of(push, partition, has_feedback=has_feedback)
    replies = coding_of(pull, partition, has_feedback=True)
    encoders = [
        PushEncoder(pushes, mine=[0], seed=args.seed, group=group, has_feedback=has_feedback)
        for group in range(args.groups if pushes is not None else 0)
    ]
    master = [each.detach().clone().requires_grad_() for each in parameters]
    optimizer = torch.optim.AdamW(master, lr=args.lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: chars.learning_rate_factor(step, args.steps)
    )
    windows = chars.windows(data[0], model.position.shape[0]).tensors
    generator = torch.Generator().manual_seed(args.seed)
    memory, sent, raw = allocate(1 << 22), 0, 0
    held = flat(parameters, partition)
    for step in range(args.steps):
        rate = scheduler.get_last_lr()[0]
        total = torch.zeros(chunk.length)
        for group in range(args.groups):
            rows = torch.randint(len(windows[0]), (args.batch_size,), generator=generator)
            loss = chars.bits_per_char(model(windows[0][rows]), windows[1][rows])
            gradient = flat(list(torch.autograd.grad(loss, parameters)), partition)
            raw += chunk.num_bytes
            if pushes is None:
                sent += chunk.num_bytes
                total += gradient
                continue
            terms = PushTerms(rate, ())
            num = encoders[group].encode(0, gradient, memory, clock=step, terms=terms)
            sent += num
            total += pushes[0].read(memory[:num]).values()
        total /= args.groups
        for segment, each in zip(chunk.segments, master, strict=True):
            part = total[segment.offset : segment.offset + segment.length]
            each.grad = part.view(each.shape).clone()
        optimizer.step()
        scheduler.step()
        values = flat(list(master), partition)
        raw += chunk.num_bytes * args.groups
        if replies is None:
            held, num = values, chunk.num_bytes
        else:
            num = reply(replies[0], values, held, memory, args.seed, step)
        sent += num * args.groups
        with torch.no_grad():
            for segment, each in zip(chunk.segments, parameters, strict=True):
                part = held[segment.offset : segment.offset + segment.length]
                each.copy_(part.view(each.shape))
    with torch.no_grad():
        for each, value in zip(parameters, master, strict=True):
            each.copy_(value)
    valid = chars.windows(data[1][:20_000], model.position.shape[0])
    bits = chars.validation_bits(model, valid, torch.device("cpu"))
    args.baseline = args.baseline or bits
    against = 100 * (bits / args.baseline - 1)
    print(f"{text:20} {bits:8.4f} {against:+8.2f} % {raw / sent:8.1f} x", flush=True)


def reply(
    coding: ChunkCoding,
    values: torch.Tensor,
    held: torch.Tensor,
    memory: memoryview,
    seed: int,
    clock: int,
) -> int:
    num = coding.encode(
        values - held,
        memory,
        whole=values,
        seed=seed_of(seed, ANY_SERVER, 0, clock),
        form=Form.CHANGE,
    )
    coding.read(memory[:num]).change(held)
    return num


def main() -> None:
    parser = argparse.ArgumentParser(description="What codecs do to learning.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=48, help="48: 77 thousand parameters")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--codecs", nargs="+", default=["none", "int8", "int4/sign"])
    args = parser.parse_args()
    args.baseline = None
    torch.set_num_threads(1)
    data = chars.load_text()
    print(f"{'codec':20} {'bits':>8} {'against':>10} {'fewer':>8}")
    for text in args.codecs:
        train(text, args, data)


if __name__ == "__main__":
    main()
