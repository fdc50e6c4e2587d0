"""Training loops as other projects write them, for answers on a simulated card against torch's allocator: one of each kind."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

CUDA = "cuda"


def draw(*shape):
    return torch.randn(*shape, device=CUDA)


def labels(*shape):
    return torch.zeros(*shape, dtype=torch.long, device=CUDA)


class Attention(nn.Module):
    """Attention with rotated queries and keys, of which several share a head, as in LLaMA."""

    def __init__(self, width, heads, groups):
        super().__init__()
        self.heads, self.groups, self.each = heads, groups, width // heads
        self.queries = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, groups * self.each, bias=False)
        self.values = nn.Linear(width, groups * self.each, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        query, key, value = (
            of(x).view(batch, length, -1, self.each).transpose(1, 2)
            for of in (self.queries, self.keys, self.values)
        )
        query, key = (tensor * cos + rotated(tensor) * sin for tensor in (query, key))
        times = self.heads // self.groups
        key, value = (tensor.repeat_interleave(times, 1) for tensor in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


def rotated(tensor):
    first, second = tensor.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Llama(nn.Module):
    def __init__(self, vocabulary=4000, width=256, layers=3):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "norm": nn.RMSNorm(width), "attention": Attention(width, 8, 2), "second_norm": nn.RMSNorm(width),
                "gate": nn.Linear(width, 704, bias=False), "up": nn.Linear(width, 704, bias=False),
                "down": nn.Linear(704, width, bias=False),
            }) for _ in range(layers)
        )  # fmt: skip
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        angles = torch.outer(torch.arange(512).float(), torch.arange(0, 32, 2).float() / 32)
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, ids):
        x, length = self.tokens(ids), ids.shape[1]
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for layer in self.layers:
            x = x + layer["attention"](layer["norm"](x), cos, sin)
            hidden = layer["second_norm"](x)
            x = x + layer["down"](F.silu(layer["gate"](hidden)) * layer["up"](hidden))
        return self.head(self.norm(x))


def llama():
    model = Llama().to(CUDA, torch.bfloat16)
    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step(model, batch_size):
        ids = labels(batch_size, 128)
        logits = model(ids)[:, :-1].float()
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


class UNet(nn.Module):
    """A denoiser: group norms, SiLU, a time embedding, skips, transposed convolutions."""

    def __init__(self, width=32):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 128), nn.SiLU(), nn.Linear(128, 2 * width))
        self.into = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 4, 2, 1)
        self.norms = nn.ModuleList(
            [nn.GroupNorm(8, width), nn.GroupNorm(8, 2 * width), nn.GroupNorm(8, 2 * width)]
        )
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.out = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x, time):
        first = F.silu(self.norms[0](self.into(x)))
        second = F.silu(self.norms[1](self.down(first))) + self.time(time)[:, :, None, None]
        second = second + self.middle(F.silu(self.norms[2](second)))
        return self.out(torch.cat([first, self.up(second)], 1))


def diffusion():
    model = UNet().to(CUDA)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step(model, batch_size):
        images, noise = draw(batch_size, 3, 32, 32), draw(batch_size, 3, 32, 32)
        time = torch.rand(batch_size, 1, device=CUDA)
        share = time[:, :, None, None]
        loss = F.mse_loss(model(images * (1 - share) + noise * share, time), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.01)

    return model, step


def recommendation():
    """Bags of features, their products, a click to predict."""

    class Clicks(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = nn.ModuleList(nn.EmbeddingBag(20_000, 32, mode="sum") for _ in range(4))
            self.dense = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
            self.top = nn.Sequential(nn.Linear(32 + 10, 64), nn.ReLU(), nn.Linear(64, 1))
            self.register_buffer("pairs", torch.tril_indices(5, 5, -1))

        def forward(self, dense, indices):
            first = self.dense(dense)
            features = torch.stack(
                [first, *(bag(index) for bag, index in zip(self.bags, indices, strict=True))], 1
            )
            products = torch.bmm(features, features.transpose(1, 2))[
                :, self.pairs[0], self.pairs[1]
            ]
            return self.top(torch.cat([first, products], 1)).squeeze(1)

    model = Clicks().to(CUDA)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.01)

    def step(model, batch_size):
        found = model(draw(batch_size, 13), [labels(batch_size, 20) for _ in range(4)])
        loss = F.binary_cross_entropy_with_logits(found, torch.zeros(batch_size, device=CUDA))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return model, step


def adversarial():
    """A generator and a critic with optimizers of their own."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(64, 64, 4, 1, 0, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
        nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False), nn.Tanh(),
    ).to(CUDA)  # fmt: skip
    critic = nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True), nn.Conv2d(32, 64, 4, 2, 1, bias=False),
        nn.BatchNorm2d(64), nn.LeakyReLU(0.2, True), nn.Conv2d(64, 1, 4, 1, 0, bias=False), nn.Flatten(0),
    ).to(CUDA)  # fmt: skip
    model = nn.ModuleList([generator, critic])
    of_generator = torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), 2e-4, betas=(0.5, 0.999))

    def step(model, batch_size):
        real, ones = draw(batch_size, 3, 16, 16), torch.ones(batch_size, device=CUDA)
        fake = generator(draw(batch_size, 64, 1, 1))
        of_critic.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(real), ones)
        (loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), 0 * ones)).backward()
        of_critic.step()
        of_generator.zero_grad()
        F.binary_cross_entropy_with_logits(critic(fake), ones).backward()
        of_generator.step()

    return model, step


STRANGERS = {
    "llama": llama,
    "diffusion": diffusion,
    "recommendation": recommendation,
    "adversarial": adversarial,
}
