"""A transformers Trainer whose batch size and gradient accumulation are set before it trains.

python examples/transformers_trainer.py                      # on a GPU: set both, then train
python examples/transformers_trainer.py --device sim:24GiB   # on any machine: find the size for a simulated card
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from oomprobe.integrations.transformers import find_max_batch

parser = argparse.ArgumentParser()
parser.add_argument("--device", help="a simulated card to probe, instead of the one that trains: sim:24GiB, sim:T4")
args = parser.parse_args()

GLOBAL_BATCH = 32  # samples for each optimizer step, however they are split


def collate(examples):
    tokens = torch.nn.utils.rnn.pad_sequence(examples, batch_first=True, padding_value=-100)
    return {"input_ids": tokens.clamp(min=0), "attention_mask": (tokens >= 0).long(), "labels": tokens}


lengths = torch.randint(16, 1025, (320,)).tolist()
trainer = Trainer(
    model=GPT2LMHeadModel(GPT2Config(n_embd=512, n_layer=2, n_head=8)),  # yours; this one has random weights
    args=TrainingArguments(
        per_device_train_batch_size=GLOBAL_BATCH,
        max_steps=10,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        use_cpu=args.device is not None,  # a simulated card needs the model in host memory
    ),
    train_dataset=[torch.randint(50_257, (length,)) for length in lengths],  # yours
    data_collator=collate,
)

# Keeps the global batch: of the splits that fit, the one with the fewest accumulation steps.
result = find_max_batch(trainer, device=args.device)
print(result)
print("per_device_train_batch_size:", trainer.args.per_device_train_batch_size)
print("gradient_accumulation_steps:", trainer.args.gradient_accumulation_steps)

if args.device is None:
    trainer.train()
