"""Print which share of the operators that public models dispatch was compared with torch's allocator, weighted by calls.

    python scripts/evidence/operator_coverage.py

Each model takes one training step on a simulated card, with random weights. A model whose package is missing is named, and
left out. Packages: torchvision, timm, transformers, diffusers, torch_geometric.
"""

import collections
import importlib
import sys
import warnings
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from calibration import torchvision_names
from strangers import STRANGERS

import oomprobe
from oomprobe.errors import SimulationError
from oomprobe.simulation import card_mode
from oomprobe.simulation.kernels.compared import is_compared

BATCH_SIZE = 2


def trained(model, loss_of, make_optimizer=torch.optim.AdamW):
    """Return a model and its step; `loss_of` takes the model and the batch size."""
    model = model.to("cuda")
    optimizer = make_optimizer(model.parameters())

    def step(model, batch_size):
        loss = loss_of(model, batch_size)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return model, step


def images(count, size=224):
    return torch.randn(count, 3, size, size, device="cuda")


def ids(*shape):
    return torch.zeros(*shape, dtype=torch.long, device="cuda")


def classifier(package, name, size=224, **options):
    models = importlib.import_module(package)
    model = (
        models.create_model(name, **options)
        if package == "timm"
        else getattr(models, name)(**options)
    )

    def loss_of(model, count):
        return torch.nn.functional.cross_entropy(model(images(count, size)), ids(count))

    return trained(model, loss_of, partial(torch.optim.SGD, lr=0.1, momentum=0.9))


def segmentation():
    from torchvision.models import segmentation

    model = segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=21)
    return trained(
        model,
        lambda model, count: torch.nn.functional.cross_entropy(
            model(images(count))["out"], ids(count, 224, 224)
        ),
    )


def configured(config_name, model_name, loss_of, make_optimizer=torch.optim.AdamW, **options):
    import transformers

    config = getattr(transformers, config_name)(**options)
    return trained(getattr(transformers, model_name)(config), loss_of, make_optimizer)


def of_language(model, count, length=64):
    tokens = ids(count, length)
    return model(input_ids=tokens, labels=tokens).loss


def of_pixels(model, count):
    return model(pixel_values=images(count), labels=ids(count)).loss


def of_speech(model, count):
    return model(
        input_features=torch.randn(count, 80, 3000, device="cuda"), labels=ids(count, 32)
    ).loss


def of_samples(model, count):
    hidden = model(input_values=torch.randn(count, 16_000, device="cuda")).last_hidden_state
    return hidden.square().mean()


def denoiser():
    from diffusers import UNet2DModel

    model = UNet2DModel(sample_size=32, block_out_channels=(32, 64), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                        up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=8)  # fmt: skip

    def loss_of(model, count):
        noise = torch.randn(count, 3, 32, 32, device="cuda")
        return torch.nn.functional.mse_loss(model(noise, ids(count)).sample, noise)

    return trained(model, loss_of)


def graph():
    from torch_geometric.nn import GATConv, SAGEConv, global_mean_pool

    layers = torch.nn.ModuleList([SAGEConv(32, 64), GATConv(64, 16, heads=4)])

    def loss_of(model, count):
        x, edges = torch.randn(count * 50, 32, device="cuda"), ids(2, count * 200)
        for layer in model:
            x = layer(x, edges).relu()
        return global_mean_pool(x, ids(count * 50), count).square().mean()

    return trained(layers, loss_of, partial(torch.optim.Adam, fused=True))


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
MODELS = {
    "resnet50": partial(classifier, "torchvision.models", "resnet50"),
    "efficientnet_b0": partial(classifier, "torchvision.models", "efficientnet_b0"),
    "swin_t": partial(classifier, "torchvision.models", "swin_t"),
    "convnext_tiny": partial(classifier, "torchvision.models", "convnext_tiny"),
    "deeplabv3": segmentation,
    "timm vit": partial(classifier, "timm", "vit_tiny_patch16_224"),
    "timm mobilenet": partial(classifier, "timm", "mobilenetv3_small_100"),
    "timm efficientvit": partial(classifier, "timm", "efficientvit_b0"),
    "gpt2": partial(configured, "GPT2Config", "GPT2LMHeadModel", of_language, n_layer=2, n_embd=64, n_head=4),
    "llama": partial(
        configured, "LlamaConfig", "LlamaForCausalLM", of_language, partial(torch.optim.AdamW, fused=True),
        num_key_value_heads=2, **SMALL,
    ),
    "bert": partial(configured, "BertConfig", "BertForMaskedLM", of_language, **SMALL),
    "t5": partial(configured, "T5Config", "T5ForConditionalGeneration", of_language, d_model=64, num_layers=2, decoder_start_token_id=0),
    "qwen2": partial(configured, "Qwen2Config", "Qwen2ForCausalLM", of_language, num_key_value_heads=2, **SMALL),
    "vit": partial(configured, "ViTConfig", "ViTForImageClassification", of_pixels, torch.optim.RAdam, **SMALL),
    "whisper": partial(
        configured, "WhisperConfig", "WhisperForConditionalGeneration", of_speech, torch.optim.Adafactor, d_model=64,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    ),
    "wav2vec2": partial(configured, "Wav2Vec2Config", "Wav2Vec2Model", of_samples, mask_time_prob=0.0, **SMALL),
    "diffusers unet": denoiser,
    "torch_geometric": graph,
    **{f"our {name}": STRANGERS[name] for name in ("adversarial", "recommendation", "diffusion")},
}  # fmt: skip


def counted(build):
    """Return how often one training step runs each operator on the card."""
    counts, simulate = collections.Counter(), card_mode.CardMode._simulate

    def noted(mode, func, args, kwargs, *, on_card, **more):
        if on_card or kwargs.get("device") == card_mode.CARD:
            counts[func] += 1
        return simulate(mode, func, args, kwargs, on_card=on_card, **more)

    device = oomprobe.SimulatedDevice("A100-80GB")
    with device.building():
        model, step = build()
    device.start_trial()
    card_mode.CardMode._simulate = noted
    try:
        with device.session():
            step(model, BATCH_SIZE)
    finally:
        card_mode.CardMode._simulate = simulate
    return counts


def main():
    warnings.simplefilter("ignore")
    torchvision_names.declare()
    every, run = collections.Counter(), 0
    for name, build in MODELS.items():
        try:
            counts = counted(build)
        except ImportError as error:
            print(f"{name}: left out, {error}")
            continue
        except SimulationError as error:
            print(f"{name}: not simulated, {error}")
            continue
        run += 1
        every.update(counts)
        print(f"{name}: {share(counts):.1%} of {sum(counts.values())} calls")
    print(
        f"{run} models: {share(every):.2%} of {sum(every.values())} calls, {len(every)} operators"
    )
    for func, count in every.most_common():
        if not is_compared(func):
            print(f"    not compared: {func} ({count} calls)")


def share(counts):
    return sum(count for func, count in counts.items() if is_compared(func)) / max(
        1, sum(counts.values())
    )


if __name__ == "__main__":
    main()
