"""Models and steps for tests: training on a card, which may be the bed's; no step reads a value back, as kernels there compute none.

A function without arguments that returns ``(model, step)`` is a target too.
"""

import ast
import inspect
import math
import textwrap
import types
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CLASSES = 10


# --- steps ---


def training_step(optimizer, draw, loss=lambda output: output.square().mean()):
    """Return the usual step, on what `draw(batch_size)` makes, or `draw(batch_size, value)` for a table."""

    def step(model, *size, **value):
        optimizer.zero_grad()
        loss(model(draw(*size, **value))).backward()
        optimizer.step()

    return step


def numbered(step):
    """Return a step that counts its calls from 1, in a closure, and passes the number on: ``step(number, model, batch_size)``."""
    number = 0

    def counted(model, *size, **value):
        nonlocal number
        number += 1
        return step(number, model, *size, **value)

    return counted


# --- models ---


def classifier(
    model, optimizer, *, amp=None, scaler=None, clip=False, accumulate=1, sample=(256,), layout=None
):
    """Return the model and a training step on random samples; the optimizer steps at every `accumulate`-th call."""

    def step(number, model, batch_size):
        x = torch.randn(batch_size, *sample, device="cuda")
        x = x if layout is None else x.to(memory_format=layout)
        y = torch.randint(CLASSES, (batch_size,), device="cuda")
        with torch.autocast("cuda", dtype=amp or torch.bfloat16, enabled=amp is not None):
            loss = F.cross_entropy(model(x), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if number % accumulate:
            return
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return model, numbered(step) if accumulate > 1 else lambda model, batch_size: step(
        0, model, batch_size
    )


def mlp(make=torch.optim.AdamW, *, fp16=False, **options):
    model = nn.Sequential(
        nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Dropout(0.1), nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, CLASSES),
    ).cuda()  # fmt: skip
    if fp16:
        options |= {"amp": torch.float16, "scaler": torch.amp.GradScaler("cuda")}
    return classifier(model, make(model.parameters()), **options)


def deep_mlp():
    blocks = (nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU()) for _ in range(24))
    model = nn.Sequential(*blocks, nn.Linear(256, CLASSES)).cuda()
    return classifier(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def many_small():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(100)), nn.Linear(16, CLASSES)).cuda()
    return classifier(model, torch.optim.AdamW(model.parameters(), foreach=False), sample=(16,))


def conv_net(**options):
    layers, width = [], 3
    for wider in (32, 64, 128):
        layers += [
            nn.Conv2d(width, wider, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(wider),
            nn.ReLU(),
        ]
        width = wider
    model = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)
    ).cuda()
    if layout := options.get("layout"):
        model = model.to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return classifier(model, optimizer, sample=(3, 64, 64), **options)


class Gpt(nn.Module):
    def __init__(self, layers, width=128, context=128, vocabulary=2000, checkpointed=False):
        super().__init__()
        self.vocabulary, self.context, self.checkpointed = vocabulary, context, checkpointed
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(
            length, device=x.device, dtype=x.dtype
        )
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, src_mask=mask, is_causal=True, use_reentrant=False)
            else:
                x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def language_model(model, optimizer, *, bf16=False, shortest=None):
    """Return the model and a training step; with `shortest`, lengths vary from that to the whole context."""

    def step(model, batch_size):
        length = (
            model.context
            if shortest is None
            else int(torch.randint(shortest, model.context + 1, ()))
        )
        tokens = torch.randint(model.vocabulary, (batch_size, length), device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()

    return model, step


def gpt(layers=2, *, bf16=False, shortest=None, **options):
    model = Gpt(layers, **options).cuda()
    return language_model(
        model, torch.optim.AdamW(model.parameters(), fused=True), bf16=bf16, shortest=shortest
    )


class Adapted(nn.Module):
    """A frozen linear layer plus a trained low-rank one."""

    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapters():
    model = Gpt(layers=3).cuda().requires_grad_(False)
    for block in model.blocks:
        block.linear1, block.linear2 = (
            Adapted(layer).cuda() for layer in (block.linear1, block.linear2)
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return language_model(model, torch.optim.AdamW(trained))


def big_state():
    model = Gpt(layers=1, vocabulary=60_000).cuda()
    return language_model(model, torch.optim.AdamW(model.parameters()))


def converted(width=2048, depth=4):
    """Weights that are made in fp32 and trained in bf16: the cache keeps fp32 blocks, with bf16 ones carved out of some."""
    model = nn.Sequential(
        *(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU()))
    )
    model = model.cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    return model, training_step(
        optimizer, lambda n: torch.randn(n, width, device="cuda", dtype=torch.bfloat16), torch.sum
    )


MODELS = {
    "mlp": mlp,
    "mlp fused": lambda: mlp(lambda parameters: torch.optim.AdamW(parameters, fused=True)),
    "mlp bf16 clipped": lambda: mlp(amp=torch.bfloat16, clip=True),
    "mlp fp16 scaled": lambda: mlp(fp16=True),
    "mlp accumulating": lambda: mlp(accumulate=4),
    "deep mlp": deep_mlp,
    "many small tensors": many_small,
    "conv": conv_net,
    "conv bf16 channels_last": lambda: conv_net(amp=torch.bfloat16, layout=torch.channels_last),
    "gpt": gpt,
    "gpt bf16 deep": lambda: gpt(layers=6, bf16=True),
    "gpt checkpointed": lambda: gpt(layers=4, checkpointed=True),
    "frozen base, adapters": adapters,
    "big state": big_state,
}


# --- fresh processes ---


def run_loop(step, calls, model, batch_size, after=lambda: None):
    """Run a training script: the body of the step in a ``for`` statement, and `after` at its end.

    Nothing of how oomprobe keeps variables is used. A step without such a body is called: a lambda, one that is decorated.
    """
    method, owner = getattr(step, "__func__", step), getattr(step, "__self__", None)
    is_called = method.__name__ in ("<lambda>", "counted") if inspect.isfunction(method) else True
    if is_called or hasattr(method, "__wrapped__"):
        for _ in range(calls):
            step(model, batch_size)
            after()
        return
    function = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
    *body, last = function.body
    if isinstance(last, ast.Return):
        last = ast.Assign([ast.Name("returned", ast.Store())], last.value)
    own = [one for one in [*body, last] if not isinstance(one, ast.FunctionDef)]
    assert not any(isinstance(node, ast.Return) for one in own for node in ast.walk(one))
    declared = [one for one in body if isinstance(one, ast.Nonlocal | ast.Global)]
    made = ast.parse("def make(): \n for call_ in range(calls_): after_()")
    loop = made.body[0].body[0]
    loop.body[:0] = [one for one in [*body, last] if one not in declared]
    assert not function.decorator_list
    function.body = [*declared, loop]
    function.args.args[:0] = [ast.arg("calls_"), ast.arg("after_")]
    made.body[0].body = [function]
    made.body[0].args.args = [ast.arg(name) for name in method.__code__.co_freevars]
    code = compile(ast.fix_missing_locations(made), inspect.getsourcefile(method), "exec")
    for _ in range(2):
        code = next(inner for inner in code.co_consts if isinstance(inner, types.CodeType))
    cells = dict(zip(method.__code__.co_freevars, method.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in code.co_freevars)
    looped = types.FunctionType(code, method.__globals__, "loop", method.__defaults__, closure)
    looped(calls, after, *([] if owner is None else [owner]), model, batch_size)


def runs(build, batch_size, *, steps, cap_bytes=None):
    """Whether this process, which has done nothing else, runs that many iterations of the loop."""
    model, step = build()
    if cap_bytes is not None:
        fraction = math.nextafter(cap_bytes / torch.cuda.mem_get_info()[1], 1.0)
        torch.cuda.set_per_process_memory_fraction(min(1.0, fraction))
    try:
        run_loop(step, steps, model, batch_size)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return False
    return True


def peaks(build, batch_size, calls):
    """Return the allocated and reserved peaks up to each call of a process that has done nothing else."""
    model, step = build()
    found = []

    def note():
        found.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))

    run_loop(step, calls, model, batch_size, note)
    return found


TARGET = """
import sys
sys.path.insert(0, {tests!r})
from bed import fail
from zoo import MODELS

def build():
    model, inner = MODELS[{name!r}]()

    def step(model, batch_size):
        {fault}
        inner(model, batch_size)

    return model, step
"""


def target(tmp_path, fault="pass", name="mlp"):
    """Write a file with one of these models and a fault in its step, and return the target."""
    path = tmp_path / "target.py"
    path.write_text(TARGET.format(tests=str(Path(__file__).parent), name=name, fault=fault))
    return f"{path}:build"
