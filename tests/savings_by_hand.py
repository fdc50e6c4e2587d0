"""Models of several kinds, with each saving of memory written by hand where a person would write it."""

from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from zoo import Gpt

CLASSES = 10
LAST_BLOCK, ATTENTION_SAVED = "checkpoint last 1 of 2", "checkpoint_attention_saved"
CONTEXTS = partial(
    create_selective_checkpoint_contexts,
    [torch.ops.aten._scaled_dot_product_efficient_attention.default],
)
HALVES = {"bf16_autocast": torch.bfloat16, "fp16_autocast": torch.float16}


class ByHand:
    """What one saving changes in a loop: the context around forward and loss, backward, the blocks, the optimizer's arguments."""

    def __init__(self, saving):
        self.saving = saving
        self.scaler = torch.amp.GradScaler("cuda") if saving == "fp16_autocast" else None

    def forward(self):
        if self.saving in HALVES:
            return torch.autocast("cuda", HALVES[self.saving])
        if self.saving == "offload_activations":
            return torch.autograd.graph.save_on_cpu(pin_memory=True)
        return nullcontext()

    def call(self, block, *args, **kwargs):
        if self.saving == "checkpoint":
            return checkpoint(block, *args, use_reentrant=False, **kwargs)
        return block(*args, **kwargs)

    def backward(self, loss):
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, optimizer):
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def optimizer(self, kind, parameters, **options):
        flags = {"fused_optimizer": {"fused": True}, "no_foreach": {"foreach": False}}.get(
            self.saving, {}
        )
        return kind(parameters, **options, **flags)


def decoder(saving, attention_dropout=0.1):
    """A language model whose loss stands in the loop."""
    hand = ByHand(saving)
    model = Gpt(2, context=64, checkpointed=saving == "checkpoint").cuda()
    for block in model.blocks:
        block.self_attn.dropout = attention_dropout
        if saving == ATTENTION_SAVED:
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False, context_fn=CONTEXTS
            )
    optimizer = hand.optimizer(torch.optim.AdamW, model.parameters())

    def step(model, batch_size):
        tokens = torch.randint(model.vocabulary, (batch_size, model.context), device="cuda")
        optimizer.zero_grad()
        with hand.forward():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        hand.backward(loss)
        hand.step(optimizer)

    return model, step


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1)
        )
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.outer(self.inner(x))


class Mixer(nn.Module):
    def __init__(self, hand, width=192, layers=6):
        super().__init__()
        self.hand = hand
        self.layers = nn.Sequential(*(Residual(width) for _ in range(layers)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            x = self.hand.call(layer, x)
        return self.head(x)


def accumulating(saving):
    """Two micro-batches a step, clipped, with weight decay for some parameters, and an average of the weights."""
    hand = ByHand(saving)
    model = Mixer(hand, layers=2).cuda()
    with_decay = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    without = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": with_decay}, {"params": without, "weight_decay": 0.0}]
    optimizer = hand.optimizer(torch.optim.AdamW, groups)
    average = torch.optim.swa_utils.AveragedModel(model)

    def step(model, batch_size):
        for _ in range(2):
            x = torch.randn(batch_size, 32, 192, device="cuda")
            target = torch.randint(CLASSES, (batch_size, 32), device="cuda")
            with hand.forward():
                loss = F.cross_entropy(model(x).transpose(1, 2), target) / 2
            hand.backward(loss)
        if hand.scaler is not None:
            hand.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        hand.step(optimizer)
        average.update_parameters(model)
        optimizer.zero_grad()

    return model, step


class Bottleneck(nn.Module):
    def __init__(self, narrow, wide, stride=1):
        super().__init__()
        self.down = nn.Conv2d(narrow, wide, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(wide)
        self.up = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.short = nn.Sequential(
            nn.Conv2d(narrow, wide, 1, stride, bias=False), nn.BatchNorm2d(wide)
        )

    def forward(self, x):
        return F.relu(self.up(F.relu(self.norm(self.down(x)))) + self.short(x))


class Pyramid(nn.Module):
    """Stages of blocks, as in residual networks."""

    def __init__(self, hand):
        super().__init__()
        self.hand, self.stem = hand, nn.Conv2d(3, 16, 3, padding=1)
        self.stage1 = nn.Sequential(Bottleneck(16, 16), Bottleneck(16, 16))
        self.stage2 = nn.Sequential(Bottleneck(16, 32, 2), Bottleneck(32, 32))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for stage in (self.stage1, self.stage2):
            for block in stage:
                x = self.hand.call(block, x)
        return self.head(x.mean((2, 3)))


def transformer_of_a_library(saving):
    """GPT-2 of transformers, whose loss is inside the model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    hand = ByHand(saving)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=96, n_head=4, vocab_size=1000, n_positions=64, attn_pdrop=0.0)
    ).cuda()
    if saving.startswith("checkpoint"):
        contexts = {"context_fn": CONTEXTS} if saving == ATTENTION_SAVED else {}
        model.activation_checkpointing_enable({"use_reentrant": False, **contexts})
    if saving == LAST_BLOCK:
        model.transformer.h[0].gradient_checkpointing = False
    optimizer = hand.optimizer(torch.optim.AdamW, model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)

    def step(model, batch_size):
        tokens = torch.randint(1000, (batch_size, 64), device="cuda")
        with hand.forward():
            loss = model(input_ids=tokens, labels=tokens).loss
        hand.backward(loss)
        hand.step(optimizer)
        scheduler.step()
        optimizer.zero_grad()

    return model, step


LOOPS = {
    "decoder": (decoder, 64),
    "accumulating": (accumulating, 256),
    "transformers": (transformer_of_a_library, 64),
    "attending": (partial(decoder, attention_dropout=0.0), 64),
}

globals().update(
    {f"{name}_as_is": partial(build, "as is") for name, (build, _) in LOOPS.items()}
)  # targets
