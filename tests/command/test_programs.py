"""Whole programs on simulated cards, as users write them: what runs, what is refused, and that nothing is lost."""

import json
import os
import runpy
import sys
import textwrap
import warnings

import pytest
from processes import start

import oomprobe
from oomprobe import errors
from oomprobe.cli import main
from oomprobe.errors import NothingFitsError, SimulationError, UnreliableError
from oomprobe.simulation import program

from .test_sitecustomize import run

pytestmark = pytest.mark.usefixtures("warm_python")
TRAIN = """
    import os, sys, argparse, torch
    from torch import nn

    def train(steps=5, rows=64, model=None, device="cuda"):
        if model is None:
            model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            x, y = torch.randn(rows, 512).to(device), torch.randint(10, (rows,)).to(device)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return model, optimizer, loss
"""


def on_card(tmp_path, code, *, card="sim:1GiB", **variables):
    """Run a program on a card, and return its exit status, its stderr and the reports."""
    given = {
        "OOMPROBE_SIMULATE": card,
        "OOMPROBE_DIR": str(tmp_path / "dir"),
        "OOMPROBE_FRACTIONS": '{"": 0.9}',
    }
    (tmp_path / "dir").mkdir(exist_ok=True)
    return run(tmp_path, textwrap.dedent(TRAIN) + textwrap.dedent(code), **{**given, **variables})


RUN = {
    "mixed precision": """
        model, optimizer = nn.Linear(512, 10).cuda(), None
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.cuda.amp.GradScaler()
        for _ in range(5):
            with torch.autocast("cuda"):
                loss = model(torch.randn(64, 512, device="cuda")).float().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert model(torch.ones(1, 512, device="cuda")).device == torch.device("cuda:0")
    """,
    "prints and logs": """
        model, _, loss = train()
        print(loss, loss.item(), f"{loss:.3f}", float(loss) > 0.5, model[0].weight[:2, :2], torch.cuda.get_device_name())
        torch.cuda.synchronize(); torch.cuda.memory_summary(); torch.cuda.mem_get_info()
        assert (model(torch.ones(4, 512).cuda()).argmax(1).cpu().numpy() == 0).mean() >= 0
    """,
    "weights replaced": """
        model, optimizer, _ = train()
        model[0].weight.data = model[0].weight.data.half().float()
        model.half().float()
        train(5, 64, model)
    """,
    "threads that do not use the card": """
        import threading
        said = []
        thread = threading.Thread(target=lambda: said.append(torch.ones(4).sum().item()))
        thread.start(); thread.join()
        assert said == [4]
        train()
    """,
    "threads that use the card": """
        import queue, threading
        batches = queue.Queue(2)

        def load():
            for _ in range(5):
                batches.put((torch.randn(64, 512).cuda(), torch.zeros(64, dtype=torch.long, device="cuda")))

        threading.Thread(target=load).start()
        model = nn.Linear(512, 10).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            x, y = batches.get()
            assert x.is_cuda
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    """,
    "buffers in host memory": """
        model, _, _ = train()
        kept, replay = torch.zeros(64, 10), torch.zeros(100_000, 512)
        kept.copy_(model(replay[:64].cuda()).detach())
        replay[:64] = torch.ones(64, 512, device="cuda").cpu()
        assert not kept.is_cuda and torch.cuda.memory_allocated() < 100 * 2**20
    """,
    "a whole model in a file": """
        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn, self.head = nn.LSTM(512, 512), nn.Linear(512, 10)

            def forward(self, x):
                return self.head(self.rnn(x)[0])

        model = Recurrent().cuda()
        torch.save(model, os.path.join(os.environ["OOMPROBE_DIR"], "model.pt"))
        loaded = torch.load(os.path.join(os.environ["OOMPROBE_DIR"], "model.pt"), weights_only=False)
        loaded.rnn.flatten_parameters()
        assert next(loaded.parameters()).is_cuda and loaded(torch.ones(3, 512).cuda()).is_cuda
        train(5, 64, loaded)
    """,
    "old habits": """
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        Tensor = torch.cuda.FloatTensor
        x = torch.autograd.Variable(Tensor(8, 4).normal_(0, 1), requires_grad=False).type(Tensor)
        assert x.is_cuda and isinstance(x, torch.cuda.FloatTensor) and torch.ones(2).is_cuda and x.type() == "torch.cuda.FloatTensor"
        train(5, 64, nn.Linear(512, 10))
    """,
    "buckets of DDP": """
        torch.distributed.init_process_group("nccl", init_method="tcp://localhost:1", rank=1, world_size=4)
        model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
        before, count = torch.cuda.memory_allocated(), sum(weight.numel() for weight in model.parameters())
        model = nn.parallel.DistributedDataParallel(model)
        assert torch.cuda.memory_allocated() - before == -(-count * 4 // 512) * 512
        train(5, 64, model)
    """,
}


STREAMS_AND_DATA = """
model, side = nn.Linear(512, 512).cuda(), torch.cuda.Stream()
optimizer, reserved = torch.optim.SGD(model.parameters(), 0.1), []
for _ in range(20):
    x = torch.randn(4096, 512, device="cuda")
    x.record_stream(side)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    reserved.append(torch.cuda.memory_reserved())
assert reserved[-1] == reserved[5]

from torch.utils.data import DataLoader, TensorDataset

class Made:
    def __len__(self):
        return 300

    def __getitem__(self, index):
        return torch.empty(512, 512).fill_(index).mean(0), index % 10

loaders = [DataLoader(Made(), 64, num_workers=1, pin_memory=True, multiprocessing_context="fork")]
data = TensorDataset(torch.arange(300.0)[:, None].expand(300, 512).contiguous(), torch.arange(300) % 10)
loaders.append(DataLoader(data, 64, num_workers=1, pin_memory=True, multiprocessing_context="spawn"))
model = nn.Linear(512, 10).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for loader in loaders:
    for x, y in loader:
        assert x.device.type == "cpu" and (x[:, 7] % 10 == y).numpy().all() and x.max() > 10
        nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda()).backward()
        optimizer.step()
"""


def run_here(code, script):
    """Run a program on a card in this process, a child; return its error, why it was refused, and which cards it used."""
    script.write_text(textwrap.dedent(TRAIN) + code)
    os.environ["OOMPROBE_DIR"] = str(script.parent)
    warnings.simplefilter("default")
    entered, ended_by = program.enter("sim:1GiB", {}), None
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        ended_by = errors.traceback_of(error)
        entered.ended_by(error)
    return ended_by, entered.refusal, entered.used


@pytest.mark.parametrize("name", RUN)
def test_programs_run(tmp_path, capsys, name):
    code = textwrap.dedent(RUN[name])
    assert start(run_here, code, tmp_path / "script.py").result() == (None, "", [0])
    assert "oomprobe" not in capsys.readouterr().err.replace(
        "oomprobe/simulation", ""
    )  # where torch says a warning comes from


def test_a_whole_process_with_streams_and_data_of_workers(tmp_path):
    """Memory that a stream used is free again when a step ends. Processes that load data are forked or spawned, and have no card."""
    status, stderr, reports = on_card(
        tmp_path, f"if __name__ == '__main__':\n{textwrap.indent(STREAMS_AND_DATA, '    ')}"
    )
    assert status == 0, stderr
    [report] = [report for report in reports if report.devices]
    assert (report.refusal, report.errors) == ("", ())
    assert report.steps >= 5
    [card] = report.devices
    assert card.peak_reserved_bytes >= 2**21
    assert card.total_bytes == 2**30
    assert card.requested  # which tells that a script ignores its batch size
    assert [*tmp_path.glob("reports/*.calls")]  # from which other sizes follow


REFUSED = {
    "caught": (
        "try: torch.randn(4, device='cuda').to_sparse()\nexcept RuntimeError: pass\ntrain()",
        "supports dense tensors only",
    ),
    "quantized": (
        "torch.quantize_per_tensor(torch.ones(4).cuda(), 0.1, 0, torch.qint8)",
        "a quantised tensor",
    ),
    "NCCL": (
        "import torch.cuda.nccl\ntorch.cuda.nccl.all_reduce([torch.ones(4).cuda()])",
        "needs CUDA itself",
    ),
    "another card": (
        "torch.ones(1, device='cuda:0'); torch.ones(1, device='cuda:1')",
        "one simulated card stands for each process",
    ),
    "CUDA itself": ("torch._C._cuda_getCurrentRawStream(0)", "needs CUDA itself"),
    "sharded": (
        "from torch.distributed.fsdp import FullyShardedDataParallel\n"
        "torch.distributed.init_process_group('nccl', rank=0, world_size=2)\nFullyShardedDataParallel(nn.Linear(4, 4).cuda())",
        "shard with fully_shard (FSDP2)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_card_lacks_is_refused_in_a_sentence(tmp_path, name):
    code, sentence = REFUSED[name]
    _, refusal, _ = start(run_here, code, tmp_path / "script.py").result()
    assert sentence in refusal


SAVES = """
    import io, pickle
    import numpy as np
    from pathlib import Path
    from huggingface_hub.serialization import _torch
    from safetensors import torch as safetensors
    from safetensors.torch import load_file, save_file

    model, optimizer, loss = train()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, Path("model.pt"))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    Path("buffer.pt").write_bytes(buffer.getvalue())
    with open("model.pkl", "wb") as file:
        pickle.dump((model, state), file)
    predicted = model(torch.ones(4, 512).cuda()).detach().cpu().numpy()
    np.save("predicted.npy", predicted)
    predicted.tofile("predicted.bin")
    torch.save({"order": torch.arange(8)}, "host.pt")
    save_file(model.state_dict(), "model.safetensors")
    for library in (_torch, safetensors):  # which tensors share memory, as a Trainer asks when it saves
        addresses = [library.storage_ptr(weight) for weight in model.parameters()]
        assert len({*addresses, library.storage_ptr(torch.ones(2, device="cuda"))}) == 5
        assert addresses == [library.storage_ptr(weight[:1]) for weight in model.parameters()]
        assert addresses == [library.storage_ptr(weight) for weight in model.state_dict().values()]
    weight = next(model.parameters())
    assert weight.data_ptr() == weight.untyped_storage().data_ptr()
    assert weight[2:].data_ptr() - weight.data_ptr() == 2 * weight.stride(0) * weight.element_size()
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}

    def check(loaded):
        assert {name: weight.shape for name, weight in loaded.items()} == shapes
        assert all(weight.is_cuda for weight in loaded.values())

    for name in ("model.pt", "buffer.pt"):
        loaded = torch.load(name, map_location="cuda")
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        assert loaded["epoch"] == 3
        check(loaded["model"])
    with open("model.pkl", "rb") as file:
        pickled, loaded = pickle.load(file)
    check(loaded["model"])
    check(load_file("model.safetensors", device="cuda"))
    assert torch.load("host.pt")["order"].tolist() == [*range(8)]  # host memory has values
    train(2, 64, pickled)
"""


def test_a_checkpoint_is_read_again_and_the_users_own_stays(tmp_path):
    """It has no values, by whatever way it is written."""
    pytest.importorskip("safetensors")
    pytest.importorskip("huggingface_hub")
    precious = (
        "model.pt",
        "buffer.pt",
        "model.pkl",
        "predicted.npy",
        "predicted.bin",
        "model.safetensors",
    )
    own = tmp_path / "own"
    for folder in (own / "tmp", tmp_path / "kept"):
        folder.mkdir(parents=True)
    for name in precious:
        (tmp_path / "kept" / name).write_text("precious")
    status, stderr, _ = on_card(
        tmp_path,
        f"    os.chdir({str(tmp_path / 'kept')!r})\n" + SAVES,
        OOMPROBE_FILES=str(own),
        OOMPROBE_CACHES=str(tmp_path / "reports"),
    )
    assert status == 0, stderr
    kept = {path.name: path.read_text() for path in (tmp_path / "kept").iterdir()}
    assert kept == dict.fromkeys(precious, "precious")
    copies = {path.name: path for path in (own / "files").rglob("*") if path.is_file()}
    assert {*copies} == {*precious, "host.pt"}
    assert copies["model.pt"].stat().st_size < 100_000


def test_what_was_assumed_is_noted(tmp_path):
    code = """
        torch.distributed.init_process_group("nccl", init_method="env://")
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (1, 4)
        model, numbers = torch.compile(nn.Linear(512, 10).cuda()), torch.arange(20).cuda()
        assert len(numbers[numbers > 4].cpu()) == 15
        train(5, 64, model)
        x = torch.randn(64, 512, device="cuda")
        x = x[x > 0]
    """
    status, stderr, (report,) = on_card(tmp_path, code, SLURM_PROCID="1", SLURM_NTASKS="4")
    assert status == 0, stderr
    for said in ("torch.compile was left out", "script.py:", "one rank of 4 was simulated"):
        assert any(said in note for note in report.notes), said
    assert not [*tmp_path.glob("reports/*.calls")]  # requests depend on values, so all sizes run


def test_a_card_that_cannot_be_entered_ends_the_program_at_its_import(tmp_path):
    said = "'nocard' is not in the catalogue"
    status, stderr, (report,) = on_card(tmp_path, "open('trained', 'w')", card="sim:nocard")
    assert status == 78
    assert f"oomprobe: the simulated card could not be entered: {said}" in stderr
    assert said in report.refusal
    assert not (tmp_path / "trained").exists()


def test_an_old_torch(monkeypatch):
    monkeypatch.setattr(program, "VERSION", (2, 5))
    with pytest.raises(SimulationError, match=r"a simulated card needs 2\.6 or later"):
        program.enter("sim:T4", {})


# --- probed ---

SCRIPT = textwrap.dedent(TRAIN) + textwrap.dedent("""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if __name__ == "__main__":
        for _ in range(50):
            train(20, options.batch_size, device=options.device)
""")
RANKS = """
    torch.distributed.init_process_group("nccl")
    rank, device = torch.distributed.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    assert torch.distributed.get_world_size() == 2 == torch.cuda.device_count() and torch.cuda.current_device() == rank
    model = nn.Sequential(nn.Unflatten(1, (8, 8, 8)), nn.Conv2d(8, 64, 3), nn.Flatten(), nn.Linear(64 * 36, 10))
    model = nn.parallel.DistributedDataParallel(model.to(device), device_ids=[device])
    train(1000, int(sys.argv[-1]), model=model)
"""


def command(tmp_path, *words, python=(), script=SCRIPT):
    path = tmp_path / "train.py"
    path.write_text(script)
    return [sys.executable, *python, str(path), "--batch-size", "{batch}", *words]


def test_a_command_is_probed_like_any_and_sizes_that_follow_from_two_runs_are_replayed(
    tmp_path, monkeypatch
):
    """On a card that is simulated though the user hides all cards from all programs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    at = tmp_path / "result.json"
    words = command(tmp_path)
    options = ["--device", "sim:64MiB", "--start-batch", "512", "--quiet", "--json", str(at)]
    assert main(["run", *options, "--", *words]) == 0
    assert os.environ.get("OOMPROBE_SIMULATE") is None
    result = oomprobe.ProbeResult.from_dict(json.loads(at.read_text()))
    assert result.limited_by == "memory"
    assert result.environment["device"] == "simulated"
    assert "holds for   a fresh process on a simulated card; torch" in str(result)
    assert "simulated: no kernel ran, and tensors had no values" in str(result)
    assert any("workspaces of cuDNN" in item for item in result.not_covered)
    assert [trial.step_s for trial in result.trials] == [None] * len(result.trials)
    assert 0 < result.confirmation.peak_reserved_bytes <= result.budget_bytes
    assert "samples/s" not in str(result)
    runs = [trial for trial in result.trials if not trial.replayed]
    assert len(runs) <= 5 < len(result.trials)
    assert [trial.phase for trial in runs][-2:] == ["confirm", "confirm"]


FEW_RUNS = {
    "keeps what a step made for two steps": """
        optimizer, kept = torch.optim.Adam(model.parameters()), []
        for _ in range(1000):
            loss = model(torch.randn(options.batch_size, 512).cuda()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept = [*kept[-1:], loss.detach().clone()]
    """,
    "makes no steps": """
        for _ in range(5):
            with torch.inference_mode():
                model(torch.randn(options.batch_size, 512).cuda()).softmax(-1).sum().item()
    """,
}


@pytest.mark.parametrize("name", FEW_RUNS)
def test_a_loop_of_another_kind_takes_few_runs_too(tmp_path, name):
    model = "model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()\n"
    script = SCRIPT.partition("if __name__")[0] + model + textwrap.dedent(FEW_RUNS[name])
    words = command(tmp_path, script=script)
    result = oomprobe.probe_command(words, device="sim:64MiB", start_batch=512, progress="off")
    runs = [trial for trial in result.trials if not trial.replayed]
    assert [trial.phase for trial in runs] == ["grow", "grow", "confirm", "confirm"]
    report = " ".join(str(result).split())
    assert ("to start and end the command" in report) == bool(runs[0].steps)


def test_a_setting_is_a_saving_of_a_command(tmp_path):
    is_set = "any('expandable_segments:True' in value for value in os.environ.values())"
    script = SCRIPT.replace("options.batch_size", f"options.batch_size // (1 + {is_set})")
    words = command(tmp_path, script=script)
    options = {"device": "sim:64MiB", "max_batch": 512, "progress": "off"}
    table = oomprobe.probe_command(
        words, savings="expandable_segments", require=512, multiple_of=512, **options
    )
    peaks = table.at(512)
    assert [*peaks] == ["as is", "expandable_segments"]
    assert peaks["expandable_segments"][0] < peaks["as is"][0]  # the script has seen it
    assert table.savings.required
    assert "expandable_segments:True" in table.savings.typed["expandable_segments"]
    assert not [name for name in os.environ if name.endswith("ALLOC_CONF")]


@pytest.mark.parametrize(
    ("words", "python", "script", "said"),
    [
        (["--device", "cpu"], (), SCRIPT, "no process of the command used the simulated card"),
        ([], ("-I",), SCRIPT, r"run Python with -I"),
        (
            [],
            (),
            SCRIPT.replace("train(20", "torch.ones(1).cuda().to_sparse(); train(20"),
            "supports dense tensors only",
        ),
    ],
    ids=["on the CPU", "isolated", "refused"],
)
def test_a_refusal_ends_the_probe_with_its_sentence(tmp_path, words, python, script, said):
    words = command(tmp_path, *words, python=python, script=script)
    with pytest.raises(SimulationError, match=said):
        oomprobe.check_command(words, 64, device="sim:1GiB", progress="off")


@pytest.mark.parametrize(
    ("probe", "rows"),
    [(oomprobe.check_command, "32"), (oomprobe.probe_command, "min(96, int(sys.argv[1]))")],
    ids=["check", "probe"],
)
def test_a_command_that_does_not_use_its_size_is_no_answer(tmp_path, probe, rows):
    script = textwrap.dedent(TRAIN) + f"train(20, {rows})"
    words = [sys.executable, "-c", script, "{batch}"]
    limit = {"start_batch": 128, "max_batch": 256}
    if probe is oomprobe.check_command:
        limit = {"batch_size": 256}
    with pytest.raises(UnreliableError, match="asked torch for exactly as many bytes"):
        probe(words, **limit, device="sim:1GiB", progress="off")


FAILING = {
    "after its third step": ("train(3, options.batch_size); print({}['loss'])", "KeyError: 'loss'\nThis is not about memory"),
    "a value that is made up": (
        "names = {0: 'cat', 7: 'dog'}\nmodel, _, loss = train(2, options.batch_size)\n"
        "names[model(torch.randn(4, 512).cuda()).argmax().item()]",
        r"KeyError: \d\nTensors of a simulated card have no values, and train\.py:23 was the last to read one",
    ),
    "a terminal": (
        "input('Name of the run: ')",
        "EOFError: EOF when reading a line\nA command has no input and no terminal: give it what it asks for",
    ),
    "a file without data": (
        "import numpy as np\nmodel, _, _ = train(2, options.batch_size)\nmodel[0].weight.detach().cpu().numpy().tofile('predicted')\n"
        "np.load('predicted')",
        "The command wrote predicted: on a simulated card these are copies, and tensors in them have no values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILING)
def test_a_failure_says_what_the_simulation_may_have_to_do_with_it(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    ends, said = FAILING[name]
    words = command(tmp_path, script=SCRIPT.partition("if __name__")[0] + ends)
    with pytest.raises(errors.StepFailedError, match=said):
        oomprobe.check_command(words, 64, device="sim:64MiB", progress="off")


def test_a_failure_that_a_shell_hides_is_named(tmp_path):
    """It exits with 0; so does a program that has made its steps."""
    words = command(tmp_path, script=SCRIPT.partition("if __name__")[0] + "train(3); {}['loss']")
    words = ["sh", "-c", f"{' '.join(words)}; true"]
    with pytest.raises(errors.StepFailedError, match="KeyError: 'loss'"):
        oomprobe.check_command(words, 64, device="sim:64MiB", progress="off")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_program_may_hide_the_card(tmp_path, when):
    hides = "os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
    script = SCRIPT.replace(
        'default="cuda"', 'default="cuda" if torch.cuda.is_available() else "cpu"'
    )
    script = (
        script.replace("parser = arg", f"{hides}parser = arg", 1)
        if when == "after"
        else f"import os; {hides}{script}"
    )
    with pytest.raises(
        SimulationError, match=r"train on the CPU \(.*an emptied CUDA_VISIBLE_DEVICES"
    ):
        oomprobe.check_command(
            command(tmp_path, script=script), 64, device="sim:1GiB", progress="off"
        )


def test_pinned_memory_is_reported_and_limited(tmp_path):
    """A block of 2 KiB a row, rounded up to a power of two, dies once it is copied."""
    script = SCRIPT.replace("512).to(device)", "512).pin_memory().to(device)")
    script = script.replace("nn.Linear(512, 512)", "nn.Linear(512, 512, device=device)")
    words = command(tmp_path, script=script)
    options = {"device": "sim:1GiB", "host_memory": "512KiB", "progress": "off"}
    result = oomprobe.check_command(words, 255, **options)
    assert result.pinned_bytes == result.host_bytes == 2**19
    with pytest.raises(NothingFitsError, match=r"1\.00 MiB of them pinned"):
        oomprobe.check_command(words, 257, **options)


EVALUATES = """
    for _ in range(4):
        model, _, _ = train(3, options.batch_size)
        kept = torch.empty(2**8 * options.batch_size, device="cuda")
        for _ in range(4):
            train(3, options.batch_size, model)
"""


def test_a_peak_that_no_replay_has_shown_ends_replaying_with_a_note(tmp_path):
    """The calls that it writes down repeat, and between later ones it takes more.

    A trial goes on for as long as its start takes, so that this start takes half a second.
    """
    starts = "import time; time.sleep(0.5)\n"
    script = SCRIPT.partition("if __name__")[0] + starts + "if True:\n" + EVALUATES
    words = command(tmp_path, script=script)
    result = oomprobe.probe_command(
        words, device="sim:1GiB", start_batch=512, max_batch=2048, progress="off"
    )
    assert result.batch_size == 2048
    assert any("predicted trials were dropped" in note for note in result.notes)


def test_ranks_are_cards_of_their_own(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = command(
        tmp_path, script=textwrap.dedent(TRAIN) + textwrap.dedent(RANKS), python=launcher
    )
    result = oomprobe.check_command(words, 64, device="sim:8GiB", progress="off")
    assert result.batch_size == 64
    assert result.trials[-1].peak_upper_bytes > result.trials[-1].peak_reserved_bytes
    assert any(
        "if convolutions take the largest workspaces they may want" in note for note in result.notes
    )
    assert str(result.device).startswith("2 x simulated")
    assert result.available_bytes == pytest.approx(0.95 * 2**33, abs=1)  # the rest is for NCCL
