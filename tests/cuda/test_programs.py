"""Whole programs reach the same peaks on a simulated card as with torch's own allocator on the bed."""

import sys
import textwrap

import pytest
from bed import run_on_bed

import oomprobe

PROLOGUE = """
    import copy, sys, torch
    from torch import nn
    from torch.nn import functional as F
    rows, device = int(sys.argv[1]), torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""
# Each ends by itself after 10 steps: how many more a trial of a command waits for depends on the time that they take.
PROGRAMS = {
    "mixed precision": """
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Dropout(0.1), nn.Linear(1024, 1000))
        model = model.to(device)
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler()
        for epoch in range(10):
            x, y = torch.randn(rows, 256).to(device), torch.randint(1000, (rows,)).to(device, non_blocking=True)
            with torch.autocast("cuda", torch.float16):
                logits = model(x)
                loss = F.cross_entropy(logits, y, label_smoothing=0.1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            print(loss.item(), (logits.argmax(1) == y).sum().item() / rows, logits[:, :5].cpu())
    """,
    "gradient penalty": """
        generator = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 784), nn.Tanh()).to(device)
        critic = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
        critic.to(device)
        optimizers = [torch.optim.Adam(model.parameters(), betas=(0.5, 0.9)) for model in (generator, critic)]
        for i in range(10):
            real = torch.cuda.FloatTensor(rows, 784).normal_()
            fake = generator(torch.randn(rows, 64, device=device))
            shares = torch.rand(rows, 1, device=device)
            mixed = (shares * real + (1 - shares) * fake.detach()).requires_grad_()
            [gradient] = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * ((gradient.norm(2, dim=1) - 1) ** 2).mean()
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            (-critic(fake).mean()).backward()
            optimizers[0].step()
    """,
    "averages and accumulation": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.rnn = nn.Embedding(2000, 128), nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
            def forward(self, tokens):
                x = self.embedding(tokens)
                for layer in self.rnn:
                    x = x + F.dropout(torch.relu(layer(x)), 0.1, self.training)
                return x @ self.embedding.weight.t()
        model = Net().cuda()
        average = copy.deepcopy(model).eval().requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        for i in range(10):
            tokens = torch.randint(0, 2000, (rows, 16))
            targets = tokens.roll(-1, 1).clone()
            targets[:, -1] = -100
            tokens, targets = tokens.pin_memory().to(device, non_blocking=True), targets.to(device)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100) / 2
            loss.backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                schedule.step()
                with torch.no_grad():
                    for kept, weight in zip(average.parameters(), model.parameters()):
                        kept.mul_(0.99).add_(weight, alpha=0.01)
                if i % 5 == 0:
                    with torch.no_grad():
                        average(tokens[: rows // 2]).softmax(-1).max(-1).values.cpu().numpy().mean()
    """,
}


TRAINED = """
import runpy, sys
sys.argv = ["train.py", "700"]
runpy.run_path({!r})
retries = torch.cuda.memory_stats()["num_alloc_retries"]
print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), retries]))
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_peaks_are_those_of_torchs_allocator(tmp_path, name):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROLOGUE) + textwrap.dedent(PROGRAMS[name]))
    command = [sys.executable, str(script), "{batch}"]
    answer = oomprobe.check_command(command, 700, device="sim:1GiB", progress="off").trials[-1]
    simulated = [answer.peak_allocated_bytes, answer.peak_reserved_bytes, answer.alloc_retries]
    assert simulated == run_on_bed(TRAINED.format(str(script)))
