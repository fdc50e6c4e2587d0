"""What loops do that a trial must not miss: catch errors, return outputs, start threads, keep variables."""

import os
import threading

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 512


def made(step_of):
    """Return a target, whose model is in a group if it is started on several ranks."""

    def build():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl")
        layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        model = nn.Sequential(*layers).cuda()
        return model, step_of(torch.optim.AdamW(model.parameters()))

    build.__name__ = step_of.__name__
    return build


@made
def skips(optimizer):
    def step(model, batch_size):
        try:
            model(torch.randn(batch_size, WIDTH, device="cuda")).square().mean().backward()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        optimizer.step()
        optimizer.zero_grad()

    return step


@made
def halves(optimizer):
    def step(model, batch_size):
        parts, done = 1, False
        while not done:
            try:
                for part in torch.randn(batch_size, WIDTH, device="cuda").chunk(parts):
                    model(part).square().mean().backward()
                done = True
            except torch.OutOfMemoryError:
                parts *= 2
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()

    return step


@made
def in_thread(optimizer):
    def evaluate(model, batch_size):
        try:
            with torch.no_grad():
                model(torch.randn(6 * batch_size, WIDTH, device="cuda"))
        except torch.OutOfMemoryError:
            pass

    def step(model, batch_size):
        model(torch.randn(batch_size, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        thread = threading.Thread(target=evaluate, args=(model, batch_size))
        thread.start()
        thread.join()

    return step


@made
def returns(optimizer):
    def step(model, batch_size):
        out = model(torch.randn(batch_size, WIDTH, device="cuda"))
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return out

    return step


@made
def keeps(optimizer):
    def step(model, batch_size):
        x = torch.randn(batch_size, WIDTH, device="cuda")
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


HABITS = {build.__name__: build for build in (skips, halves, in_thread, returns, keeps)}
