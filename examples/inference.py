"""Score continuations by their log-likelihood, as lm-evaluation-harness does, in the largest batches that fit.

python examples/inference.py                      # on a GPU: find the size, then score with it
python examples/inference.py --device sim:24GiB   # on any machine: find the size for a simulated card
"""

import argparse

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

import oomprobe

parser = argparse.ArgumentParser()
parser.add_argument("--device", help="a simulated card to probe, instead of the one that scores: sim:24GiB, sim:T4")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() and args.device is None else "cpu"
config = LlamaConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8)
model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()  # yours; this one has random weights


def request(context_length, continuation_length):
    tokens = torch.randint(config.vocab_size, (context_length + continuation_length,))
    return tokens, torch.arange(len(tokens)) >= context_length  # the tokens, and which of them to score


requests = [request(length, 24) for length in torch.randint(16, 1000, (2000,)).tolist()]


def collate(requests):
    return [pad_sequence(field, batch_first=True) for field in zip(*requests, strict=True)]


@torch.inference_mode()
def score(tokens, is_scored):  # causal attention never looks at the padding, which is on the right
    tokens, is_scored = tokens.to(device), is_scored.to(device)
    logits = model(tokens, use_cache=False).logits[:, :-1].float()
    likelihoods = torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return (likelihoods * is_scored[:, 1:]).sum(-1).tolist()


largest = oomprobe.worst_case_batches(requests, collate)  # batches of the longest requests


def step(model, batch_size):
    score(*largest(batch_size))


result = oomprobe.find_max_batch(model, step, device=args.device, multiple_of=8, max_batch=len(requests))
print(result)

if args.device is None:
    requests.sort(key=lambda request: -len(request[0]))  # the longest first, so each batch is padded little
    scores = []
    for start in range(0, len(requests), result.batch_size):
        scores += score(*collate(requests[start : start + result.batch_size]))
    print(f"scored {len(scores)} continuations")
