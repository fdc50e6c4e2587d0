"""Programs as strangers write them, whole on a simulated card: reinforcement learning, metrics, flags, decoding, experts, codebooks, boxes, lengths."""

import textwrap

import pytest
from processes import start

from .test_programs import run_here

PPO = """
    from torch.distributions import Categorical
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2), nn.Softmax(dim=-1))
            self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

        def act(self, state):
            dist = Categorical(self.actor(state))
            action = dist.sample()
            return action.detach(), dist.log_prob(action).detach(), self.critic(state).detach()

        def evaluate(self, state, action):
            dist = Categorical(self.actor(state))
            return dist.log_prob(action), self.critic(state), dist.entropy()

    policy, old = ActorCritic().to(device), ActorCritic().to(device)
    old.load_state_dict(policy.state_dict())
    optimizer = torch.optim.Adam([{"params": policy.actor.parameters(), "lr": 3e-4}, {"params": policy.critic.parameters(), "lr": 1e-3}])
    for update in range(3):
        states, actions, logprobs, values, rewards = [], [], [], [], []
        for t in range(16):
            state = torch.FloatTensor([0.0, 1.0, 0.5, t]).to(device)
            with torch.no_grad():
                action, logprob, value = old.act(state)
            assert action.item() in (0, 1), "no such action"
            rewards.insert(0, 1.0 + 0.99 * (rewards[0] if rewards else 0.0))
            states.append(state), actions.append(action), logprobs.append(logprob), values.append(value)
        rewards = torch.tensor(rewards, dtype=torch.float32).to(device)
        rewards = (rewards - rewards.mean()) / (rewards.std() + 1e-7)
        states, actions = torch.squeeze(torch.stack(states)), torch.squeeze(torch.stack(actions))
        logprobs, values = torch.squeeze(torch.stack(logprobs)), torch.squeeze(torch.stack(values))
        for _ in range(4):
            said, value, entropy = policy.evaluate(states, actions)
            ratios = torch.exp(said - logprobs)
            advantages = rewards - values
            surrogate = torch.min(ratios * advantages, torch.clamp(ratios, 0.8, 1.2) * advantages)
            loss = -surrogate + 0.5 * nn.MSELoss()(value.squeeze(), rewards) - 0.01 * entropy
            optimizer.zero_grad(); loss.mean().backward(); optimizer.step()
        old.load_state_dict(policy.state_dict())
"""
SAC = """
    from torch.distributions import Normal

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.mean, self.log_std = nn.Linear(17, 64), nn.Linear(64, 6), nn.Linear(64, 6)
            self.action_scale, self.action_bias = torch.tensor(1.0), torch.tensor(0.0)

        def sample(self, state):
            x = nn.functional.relu(self.hidden(state))
            mean, log_std = self.mean(x), torch.clamp(self.log_std(x), min=-20, max=2)
            normal = Normal(mean, log_std.exp())
            x_t = normal.rsample()
            y_t = torch.tanh(x_t)
            log_prob = normal.log_prob(x_t) - torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
            return y_t * self.action_scale + self.action_bias, log_prob.sum(1, keepdim=True)

        def to(self, device):
            self.action_scale, self.action_bias = self.action_scale.to(device), self.action_bias.to(device)
            return super().to(device)

    policy, critic = Policy().to("cuda"), nn.Sequential(nn.Linear(23, 64), nn.ReLU(), nn.Linear(64, 1)).to("cuda")
    optimizer, critic_optimizer = torch.optim.Adam(policy.parameters()), torch.optim.Adam(critic.parameters())
    log_alpha = torch.zeros(1, requires_grad=True, device="cuda")
    alpha_optimizer = torch.optim.Adam([log_alpha])
    for _ in range(4):
        alpha = log_alpha.exp().item()
        state, reward = torch.FloatTensor(32, 17).to("cuda"), torch.FloatTensor([1.0] * 32).to("cuda").unsqueeze(1)
        with torch.no_grad():
            action, log_prob = policy.sample(state)
            target = reward + 0.99 * (critic(torch.cat([state, action], 1)) - alpha * log_prob)
        loss = nn.functional.mse_loss(critic(torch.cat([state, action], 1)), target)
        critic_optimizer.zero_grad(); loss.backward(); critic_optimizer.step()
        action, log_prob = policy.sample(state)
        loss = (alpha * log_prob - critic(torch.cat([state, action], 1))).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        loss = -(log_alpha * (log_prob - 6).detach()).mean()
        alpha_optimizer.zero_grad(); loss.backward(); alpha_optimizer.step()
"""
VAE = """
    from torch import distributions as D
    encoder, decoder = nn.Linear(784, 40).cuda(), nn.Linear(20, 784).cuda()
    optimizer = torch.optim.Adam(list(encoder.parameters()) + list(decoder.parameters()))
    prior = D.Independent(D.Normal(torch.zeros(20, device="cuda"), torch.ones(20, device="cuda")), 1)
    for i in range(4):
        x = torch.rand(32, 784).bernoulli().cuda()
        mu, raw = encoder(x).chunk(2, -1)
        posterior = D.Normal(mu, nn.functional.softplus(raw) + 1e-4)
        pixels = D.Bernoulli(logits=decoder(posterior.rsample()))
        kl = D.kl_divergence(D.Independent(posterior, 1), prior)
        loss = (kl - pixels.log_prob(x).sum(-1)).mean()
        if torch.isnan(loss).any() or torch.isnan(loss).sum().item() > 0:
            raise ValueError("NaN")
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
METRICS = """
    from torch.nn import functional as F
    model = nn.Linear(32, 10).cuda()
    optimizer, confusion, best = torch.optim.AdamW(model.parameters()), torch.zeros(10, 10, dtype=torch.long, device="cuda"), 0.0
    for epoch in range(3):
        x, y = torch.randn(64, 32).cuda(), torch.randint(0, 10, (64,)).cuda()
        output = F.log_softmax(model(x), dim=1)
        loss = F.nll_loss(output, y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        pred = output.argmax(dim=1)
        correct = 0
        correct += pred.eq(y).sum().item()
        confusion += torch.bincount(y * 10 + pred, minlength=100).reshape(10, 10)
        top5 = output.topk(5).indices
        hits = torch.zeros(64, 10, dtype=torch.int, device="cuda").scatter(1, top5, 1)
        hits, target = hits * F.one_hot(y, 10), F.one_hot(pred)
        assert target.shape == (64, 10) and pred.bincount().shape == (10,) and len(pred.unique()) == 10
        tp, fp = (hits == 1).sum(0), ((hits == 1) & (target == 0)).sum(0)
        bins = torch.bucketize(output.exp().max(1).values, torch.linspace(0, 1, 16, device="cuda")) - 1
        error = torch.zeros(16, device="cuda").scatter_add_(0, bins, torch.ones(64, device="cuda"))
        print("Accuracy: {}/64 ({:.0f}%)".format(correct, 100.0 * correct / 64), (tp / (tp + fp)).mean().item(), error.max().item())
        best = max(best, correct / 64)
    print(confusion.diag() / confusion.sum(1))
"""
FLAGS = """
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("use_shift", torch.tensor(0.0))
            self.register_buffer("scale", torch.tensor([2.0]))
            self.register_buffer("initialized", torch.tensor(0))

        def forward(self, x):
            if self.use_shift:
                raise RuntimeError("no shift was configured")
            if self.scale.item() != 2:
                raise ValueError(self.scale)
            if self.initialized.item() == 0:
                self.initialized.fill_(1)
            return self.linear(x)

    model, scaler = Shifted().cuda(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    for i in range(4):
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(32, 16, device="cuda")).float().pow(2).mean()
        optimizer.zero_grad(); scaler.scale(loss).backward(); scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer); scaler.update()
        assert before <= scaler.get_scale(), "skipped"
    assert model.initialized.item() == 1
"""
DECODING = """
    model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100)).cuda()
    optimizer, vocabulary = torch.optim.AdamW(model.parameters()), [str(i) for i in range(100)]

    @torch.no_grad()
    def generate(length):
        tokens = torch.zeros(1, 1, dtype=torch.long, device="cuda")
        for _ in range(length):
            logits = model(tokens)[:, -1] / 0.8
            values, _ = torch.topk(logits, 20)
            logits[logits < values[:, [-1]]] = -float("inf")
            following = torch.multinomial(torch.softmax(logits, -1), 1)
            if following.item() == 99:
                break
            tokens = torch.cat([tokens, following], 1)
        return "".join(vocabulary[token] for token in tokens[0].tolist()), tokens.shape[1]

    for _ in range(4):
        x = torch.randint(0, 100, (8, 32)).cuda()
        logits = model(x)
        lengths = (logits.argmax(-1) != 0).sum(1)
        kept = logits[:, : lengths.max().item()]
        assert kept.shape == (8, 32, 100), kept.shape
        masked = torch.rand(8, 32, device="cuda") < 0.15
        loss = kept.mean() + nn.functional.cross_entropy(logits[masked], x[masked])
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    assert generate(10)[1] == 11
"""
EXPERTS = """
    from torch.nn import functional as F

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(32, 4), nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

        def forward(self, x):
            chances = F.softmax(self.gate(x), -1)
            weights, chosen = torch.topk(chances, 2, -1)
            result, mask = torch.zeros_like(x), F.one_hot(chosen).permute(2, 1, 0)
            assert mask.shape[0] == 4, "an expert is missing"
            for number, expert in enumerate(self.experts):
                slot, token = torch.where(mask[number])
                if token.shape[0] == 0:
                    continue
                result.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            load = torch.bincount(chosen.flatten(), minlength=4)
            room = load.max().item()
            assert room == chosen.numel(), "the worst case"
            return result, (load.float() / load.sum() * chances.mean(0)).sum()

    model = Experts().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        y, balance = model(torch.randn(64, 32, device="cuda"))
        loss = y.pow(2).mean() + 0.01 * balance
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        assert all(expert.weight.grad is not None for expert in model.experts)
"""
CODEBOOK = """
    from torch.nn import functional as F

    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("initted", torch.Tensor([False]))
            for name, made in (("embed", torch.randn(128, 32)), ("cluster_size", torch.zeros(128))):
                self.register_buffer(name, made)

        def forward(self, z):
            if not self.initted:
                chosen = torch.randint(0, z.shape[0], (128,), device=z.device)
                self.embed.data.copy_(z.detach()[chosen])
                self.initted.data.copy_(torch.Tensor([True]))
            index = torch.cdist(z, self.embed).argmin(-1)
            onehot = F.one_hot(index, 128).type(z.dtype)
            self.cluster_size.data.mul_(0.99).add_(onehot.sum(0), alpha=0.01)
            dead = self.cluster_size < 1.0
            if torch.any(dead):
                picked = torch.randint(0, z.shape[0], (dead.sum().item(),), device=z.device)
                self.embed.data[dead] = z.detach()[picked]
            assert index.unique().numel() <= 128, "more codes than there are"
            average = onehot.mean(0)
            perplexity = torch.exp(-torch.sum(average * torch.log(average + 1e-10)))
            quantized = F.embedding(index, self.embed)
            return z + (quantized - z).detach(), F.mse_loss(z, quantized.detach()), perplexity

    codebook, encoder, decoder = Codebook().cuda(), nn.Linear(64, 32).cuda(), nn.Linear(32, 64).cuda()
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    for _ in range(4):
        x = torch.randn(256, 64).cuda()
        quantized, commit, perplexity = codebook(encoder(x))
        loss = F.mse_loss(decoder(quantized), x) + 0.25 * commit
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(f"{loss.item():.4f} {perplexity.item():.1f}")
    assert codebook.initted.item() == 1
"""
DETECTION = """
    from torch.nn import functional as F
    model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=4), nn.ReLU(), nn.Conv2d(16, 5, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def overlap(one, two):
        low, high = torch.max(one[:, None, :2], two[:, :2]), torch.min(one[:, None, 2:], two[:, 2:])
        common = (high - low).clamp(min=0).prod(2)
        areas = [(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) for boxes in (one, two)]
        return common / (areas[0][:, None] + areas[1] - common)

    for i in range(4):
        targets = []
        for _ in range(2):
            corner, labels = torch.rand(9, 2) * 32, torch.randint(1, 5, (9,)).cuda()
            targets.append({"boxes": torch.cat([corner, corner + 1 + torch.rand(9, 2) * 31], 1).cuda(), "labels": labels})
        output, losses = model(torch.rand(2, 3, 64, 64).cuda()).flatten(2).transpose(1, 2), []
        for predicted, target in zip(output, targets):
            boxes = target["boxes"] * 2
            degenerate = boxes[:, 2:] <= boxes[:, :2]
            if degenerate.any():
                raise ValueError(f"a box without an area: {boxes[degenerate.any(1).nonzero()[0]].tolist()}")
            anchors = torch.cat([predicted[:, :2], predicted[:, :2] + predicted[:, 2:4].exp()], 1).detach()
            value, match = overlap(boxes, anchors).max(0)
            match[value < 0.4] = -1
            found = torch.where(match >= 0)[0]
            losses.append(F.l1_loss(predicted[found, :4], boxes[match[found]], reduction="sum") / max(1, found.numel()))
            wanted = (match >= 0).float()
            losses.append(F.binary_cross_entropy_with_logits(predicted[:, 4], wanted))
        loss = sum(losses)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
TAGGING = """
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
    embed, tagger, out = nn.Embedding(100, 16).cuda(), nn.GRU(16, 32, bidirectional=True, batch_first=True).cuda(), nn.Linear(64, 9).cuda()
    optimizer = torch.optim.Adam([*embed.parameters(), *tagger.parameters(), *out.parameters()])
    for i in range(4):
        lengths = torch.tensor([3, 7, 1, 7])
        words, tags = torch.randint(1, 100, (4, 7)).cuda(), torch.randint(0, 9, (4, 7)).cuda()
        packed = pack_padded_sequence(embed(words), lengths, batch_first=True, enforce_sorted=False)
        assert (packed.data.shape, packed.batch_sizes.tolist()) == ((18, 16), [4, 3, 3, 2, 2, 2, 2])
        hidden, read = pad_packed_sequence(tagger(packed)[0], batch_first=True)
        assert hidden.shape == (4, 7, 64) and read.tolist() == [3, 7, 1, 7]
        known = (torch.arange(7) < lengths[:, None]).cuda()
        loss = nn.functional.cross_entropy(out(hidden)[known], tags[known])
        spoken = nn.functional.log_softmax(out(embed(torch.randint(0, 100, (30, 4)).cuda()).repeat(1, 1, 4)), 2)
        loss = loss + nn.functional.ctc_loss(spoken, tags, torch.full((4,), 30), lengths, zero_infinity=True)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
PROGRAMS = {
    "PPO": PPO, "SAC": SAC, "VAE": VAE, "metrics": METRICS, "flags": FLAGS, "decoding": DECODING, "experts": EXPERTS, "codebook": CODEBOOK,
    "detection": DETECTION, "tagging": TAGGING,
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_it_is(tmp_path, name):
    code = textwrap.dedent(PROGRAMS[name])
    assert start(run_here, code, tmp_path / "script.py").result() == (None, "", [0])
