"""What only a real card can show: the module is brought there by each fit and taken back, and is counted once."""

import pytest
import torch

from integrations.lightning_models import MIB, Data, Module, quiet_trainer
from oomprobe.integrations.lightning import find_max_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # what drivers and libraries warn about differs from card to card
]
GIB = 2**30


class OnCard(Module):
    """64 MiB of memory that the allocator gives for each sample."""

    def training_step(self, batch, batch_idx):
        block = torch.empty(len(batch[0]) * 64 * MIB, dtype=torch.uint8, device=self.device)
        return self.layer(batch[0]).square().mean() + block[:1].float().mean() * 0


@pytest.mark.parametrize("starts_on", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-true"])
def test_the_answer_is_what_the_budget_holds_wherever_the_module_was(starts_on, precision):
    module = OnCard().to(starts_on)
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    trainer = quiet_trainer(accelerator="gpu", devices=1, precision=precision, limit_val_batches=0)
    result = find_max_batch(trainer, module, Data(1000), device="cuda:0:4GiB", progress="off")
    assert 52 <= result.batch_size <= int(0.9 * 4 * GIB) // (64 * MIB)
    assert result.limited_by == "memory"
    assert {parameter.device.type for parameter in module.parameters()} == {starts_on}
    assert all(torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True))


def test_the_weights_are_on_the_card_once():
    """A second copy, of what keeps the state, would halve the room."""
    module = OnCard().to("cuda")
    module.large = torch.nn.Linear(16384, 16384, device="cuda")  # 1 GiB, and as much for its gradient: it has none
    module.large.requires_grad_(False)
    trainer = quiet_trainer(accelerator="gpu", devices=1, limit_val_batches=0)
    result = find_max_batch(trainer, module, Data(1000), device="cuda:0:4GiB", progress="off")
    assert result.batch_size >= int((0.9 * 4 * GIB - GIB) // (64 * MIB)) - 4
