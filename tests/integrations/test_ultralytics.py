"""The drop-in for Ultralytics' AutoBatch, with the real Ultralytics; nothing is downloaded."""

import copy
import inspect
import json
import logging
import math
import os
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import ultralytics
from ledger import HERE
from processes import start
from ultralytics.cfg import get_cfg
from ultralytics.engine import trainer
from ultralytics.utils import autobatch

import oomprobe
from oomprobe.devices import choose_device
from oomprobe.integrations import ultralytics as adapter
from oomprobe.integrations.framework import quiet_loggers
from oomprobe.integrations.ultralytics import check_train_batch_size, find_max_batch, install
from oomprobe.records.patience import Patience

from .drivers import QUICK, TINY, state_of, tiny_detector

ONCE = {"steps": 1, "confirm_steps": 1}


@pytest.fixture(autouse=True)
def quiet():
    with quiet_loggers("ultralytics"):
        yield


def built(name):
    torch.manual_seed(0)
    return ultralytics.YOLO(f"{name}.yaml", verbose=False).model


@pytest.fixture
def nano():
    return tiny_detector()


@pytest.fixture
def logged():
    """The records of Ultralytics' logger, as (level, text)."""
    logger = logging.getLogger("ultralytics")
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


def prepared(model, *, imgsz=64, objects=1, dataset_size=0):
    return adapter.Training(
        model, choose_device("cpu:1GiB", model), imgsz, torch.float16, objects, dataset_size
    )


def criteria(trained):
    return [
        one
        for one in (trained.criterion, *vars(trained.criterion).values())
        if hasattr(one, "assigner")
    ]


# --- signatures ---


def test_arguments_match_the_original():
    original = inspect.signature(autobatch.check_train_batch_size)
    theirs = [(p.name, p.kind, p.default) for p in original.parameters.values()]
    parameters = list(inspect.signature(check_train_batch_size).parameters.values())
    assert [(p.name, p.kind, p.default) for p in parameters[: len(theirs)]] == theirs
    assert [p.name for p in parameters[6:]] == ["options"]
    assert inspect.signature(check_train_batch_size).return_annotation == "int"
    for amp in (value for value in adapter.AUTOCAST if isinstance(value, str)):
        assert get_cfg(overrides={"amp": amp}).amp == amp


# --- what is run ---


TASKS = [
    "yolo26n-seg",
    "yolo26n-pose",
    "yolo11n-obb",
    "yolo11n-cls",
    "yolo26n-sem",
    "yolo26n-depth",
    "yolov8s-world",
]


@pytest.mark.parametrize("name", TASKS)
def test_models_of_every_task(name):
    model = built(name)
    before = state_of(model)
    result = find_max_batch(model, imgsz=64, max_num_obj=8, min_batch=2, max_batch=2, **QUICK)
    assert (result.batch_size, result.state_verified) == (2, True)
    assert not any("no optimizer stepped" in note for note in result.notes)
    assert state_of(model) == before


def test_a_simulated_card_is_refused(nano):
    for device in ("sim:RTX-3090", oomprobe.SimulatedDevice("RTX-3090")):
        with pytest.raises(
            oomprobe.InvalidArgumentError, match=r"a simulated card cannot run.*device='cpu:8GiB'"
        ):
            find_max_batch(nano, imgsz=64, device=device)


def batch_of(task, batch_size, *, objects=1, channels=3, **arguments):
    arguments = SimpleNamespace(**{"mask_ratio": 4, "overlap_mask": True, **arguments})
    net = SimpleNamespace(
        yaml={"channels": channels}, model=[SimpleNamespace(nc=5)], args=arguments
    )
    return adapter._worst_batch(net, task, batch_size, imgsz=64, objects=objects)


def test_every_image_has_all_objects_of_a_quarter_each():
    batch = batch_of("detect", 3, objects=12, channels=1)
    assert batch["img"].shape == (3, 1, 64, 64)
    assert 0 <= batch["img"].min() < batch["img"].max() <= 1
    assert [int((batch["batch_idx"] == i).sum()) for i in range(3)] == [12, 12, 12]
    middle, size = batch["bboxes"][:, :2], batch["bboxes"][:, 2:]
    assert (middle - size / 2 >= 0).all()
    assert (middle + size / 2 <= 1).all()
    assert torch.allclose(size.prod(1), torch.tensor(0.25))
    assert len({tuple(place.tolist()) for place in middle[:12]}) == 12  # spread
    assert set(batch["cls"].flatten().tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0}


@pytest.mark.parametrize(
    ("objects", "arguments", "shape", "dtype"),
    [
        (255, {}, (2, 16, 16), torch.uint8),
        (256, {}, (2, 16, 16), torch.int32),  # too many for 8 bits
        (256, {"overlap_mask": False, "mask_ratio": 2}, (512, 32, 32), torch.uint8),
    ],
)
def test_masks_match_the_trainers_data(objects, arguments, shape, dtype):
    masks = batch_of("segment", 2, objects=objects, **arguments)["masks"]
    assert (tuple(masks.shape), masks.dtype) == (shape, dtype)


@pytest.mark.parametrize(("name", "matched"), [("yolo11n", [40]), ("yolo26n", [40, 4])])
def test_as_many_anchors_as_possible_are_matched(name, matched):
    """A quarter of all pairs; 10 anchors for each of four objects, 1 in the second loss of an end-to-end model."""
    training = prepared(built(name), imgsz=256, objects=4)
    pairs_of, matched_of = [], []
    for criterion in criteria(training.model):
        pairs, loss = criterion.assigner.get_box_metrics, criterion.bbox_loss.forward
        criterion.assigner.get_box_metrics = lambda *a, pairs=pairs: (
            pairs_of.append(a[4].bool()),
            pairs(*a),
        )[1]
        criterion.bbox_loss.forward = lambda *a, loss=loss: (
            matched_of.append(a[6].sum(1).tolist()),
            loss(*a),
        )[1]
    training.run(training.model, 3)
    assert pairs_of[0].shape == (3, 4, 32 * 32 + 16 * 16 + 8 * 8)
    assert pairs_of[0].float().mean().item() == pytest.approx(0.25, rel=0.1)
    assert matched_of == [[count] * 3 for count in matched]


def test_an_assigner_does_not_continue_image_by_image(nano, monkeypatch):
    def refuse_two(assigner, scores, *_):
        if len(scores) > 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return (torch.zeros(1, 84),) * 5

    kind = type(nano.init_criterion().assigner)
    monkeypatch.setattr(kind, "_forward", refuse_two)
    anchors = torch.rand(84, 2)
    targets = torch.zeros(2, 1, 1), torch.rand(2, 1, 4), torch.ones(2, 1, 1)
    assert (
        len(kind()(torch.rand(2, 84, 80), torch.rand(2, 84, 4), anchors, *targets)) == 5
    )  # the original swallows the error
    training = prepared(nano)
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        training.run(training.model, 2)


def test_the_optimizer_is_the_one_of_the_trainer(nano):
    def built_for(**change):
        size = change.pop("dataset_size", 0)
        model = copy.deepcopy(nano)
        model.args = {**model.args, **change}
        return type(prepared(model, dataset_size=size).optimizer).__name__

    assert built_for() == built_for(dataset_size=640, epochs=100) == "AdamW"
    assert built_for(dataset_size=64 * 1000, epochs=100) == "MuSGD"
    assert built_for(optimizer="SGD", dataset_size=640) == "SGD"


def test_trials_change_no_weight_and_keep_gradients_as_while_they_accumulate(nano):
    training = prepared(nano, objects=4)
    parameters = list(training.model.parameters())
    before = [p.clone() for p in parameters]
    training.run(training.model, 2)
    assert all(map(torch.equal, parameters, before))
    assert all(p.grad is not None for p in parameters if p.requires_grad)


def test_min_batch_is_two_if_batch_norm_needs_it(nano):
    assert check_train_batch_size(nano, 32, dataset_size=2, device=HERE, **ONCE) == 2


def test_what_is_said_of_the_trials(nano):
    result = find_max_batch(nano, imgsz=64, max_batch=1, **QUICK)
    notes, listed = " ".join(result.notes), " ".join(result.not_covered)
    assert "no optimizer stepped" not in notes
    assert "AdamW, no autocast" in notes  # on the CPU
    assert "batches twice as large" in listed
    assert "mixup" in listed


# --- check_train_batch_size ---


def test_a_model_on_the_cpu_gets_the_default_and_a_warning(nano, logged):
    assert check_train_batch_size(nano) == 16
    (warning,) = [text for level, text in logged if level == "WARNING"]
    assert "WHICH WAS NOT RUN" in warning
    assert "device='cpu:8GiB'" in warning


def test_if_nothing_fits_there_is_no_default(nano):
    with pytest.raises(oomprobe.NothingFitsError, match="smallest allowed"):
        check_train_batch_size(nano, 1280, device="cpu:32MiB")


@pytest.mark.parametrize(
    "wrong",
    [
        {"imgsz": 0},
        {"max_num_obj": -1},
        {"dataset_size": 2.5},
        {"amp": "half"},
    ],
    ids=str,
)
def test_a_wrong_argument_is_an_error(nano, wrong):
    with pytest.raises(
        oomprobe.InvalidArgumentError, match=f"^{next(iter(wrong))} must be .*, not "
    ):
        check_train_batch_size(nano, **{"imgsz": 64, "device": "cpu:1GiB", **wrong})


@pytest.mark.parametrize(
    ("arguments", "stride", "trained_with", "memory_fraction"),
    [
        ([96, torch.bfloat16, 0.8, 3, 50], 32.0, (96, torch.bfloat16, 3, 50), 0.8),
        ([1, False], 32.0, (32, None, 1, 0), 0.6),
        ([64, "bf16"], 32.0, (64, torch.bfloat16, 1, 0), 0.6),
        ([65, torch.bfloat16], 64.0, (128, torch.bfloat16, 1, 0), 0.6),
    ],
)
def test_arguments_reach_the_probe(
    nano, monkeypatch, arguments, stride, trained_with, memory_fraction
):
    def training(model, device, *received):
        assert received == trained_with

    def probe(loop, options):
        assert options["memory_fraction"] == memory_fraction
        raise oomprobe.NothingFitsError("")

    monkeypatch.setattr(adapter, "Training", training)
    monkeypatch.setattr(adapter.framework, "probe", probe)
    nano.stride = torch.tensor([stride])
    with pytest.raises(oomprobe.NothingFitsError):
        check_train_batch_size(nano, *arguments, device="cpu:1GiB")


def test_the_answer_is_logged_and_no_file_is_written(nano, logged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = check_train_batch_size(nano, 64, dataset_size=2, device="cpu:1GiB", **ONCE)
    (line,) = [text for level, text in logged if level == "INFO" and "AutoBatch" in text]
    assert f"Using batch-size {answer}, which ran" in line
    assert not any(
        "optimizer:" in text for _, text in logged
    )  # the trials' optimizer is not logged
    assert list(tmp_path.iterdir()) == []


# --- install ---


def test_install_replaces_what_the_trainer_calls(nano):
    before = trainer.check_train_batch_size
    with install(device=HERE, max_batch=2, progress="off", **ONCE):
        called = {"imgsz": 64, "amp": False, "batch": -1, "max_num_obj": 4, "dataset_size": 9}
        assert trainer.check_train_batch_size(model=nano, **called) == 2
    assert trainer.check_train_batch_size is before
    undo = install()
    assert trainer.check_train_batch_size is not before
    undo.close()
    assert trainer.check_train_batch_size is before


COMMON = {
    "data": "tiny.yaml",
    "imgsz": 64,
    "device": "cpu",
    "workers": 0,
    "plots": False,
    "verbose": False,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Eight random images with two objects each."""
    from PIL import Image

    place = tmp_path_factory.mktemp("tiny")
    random = np.random.default_rng(0)
    for kind in ("images", "labels"):
        (place / kind / "train").mkdir(parents=True)
    for i in range(8):
        Image.fromarray(random.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(
            place / "images/train" / f"{i}.png"
        )
        boxes = "\n".join(f"{k} {0.3 + 0.4 * k} 0.5 0.2 0.3" for k in range(2))
        (place / "labels/train" / f"{i}.txt").write_text(boxes)
    (place / "tiny.yaml").write_text(
        f"path: {place}\ntrain: images/train\nval: images/train\nnames: {{0: a, 1: b}}\n"
    )
    (place / "tiny_model.yaml").write_text(json.dumps(TINY))
    return place


def beside_the_images(folder, train):
    """Train in a child, which may change what it likes; return what `train` returns."""

    def child():
        import torchvision

        os.chdir(folder)
        torch.set_num_threads(1)  # the threads of this process are not there
        warnings.simplefilter("ignore")
        # If the operators of torchvision do not load, the validation at the end of training needs this one.
        torchvision.ops.nms = lambda boxes, scores, threshold: scores.argsort(descending=True)[:10]
        return train()

    return start(child).result(limit_s=90)


def test_training_matches_training_with_that_batch(tiny, logged):
    def train():
        settings = {
            **COMMON,
            "epochs": 1,
            "val": False,
            "seed": 3,
            "nbs": 4,
            "project": str(tiny / "runs"),
        }
        with install(device=HERE, max_batch=6, progress="off", **ONCE):
            ultralytics.YOLO(tiny / "tiny_model.yaml").train(batch=-1, name="probed", **settings)
        trainer.check_train_batch_size = lambda **_: (
            6
        )  # the same path through the trainer, without a probe
        ultralytics.YOLO(tiny / "tiny_model.yaml").train(batch=-1, name="plain", **settings)
        return logged

    assert any(
        "Using batch-size 6, which ran in 60%" in text for _, text in beside_the_images(tiny, train)
    )
    probed, plain = (
        (tiny / "runs" / name / "results.csv").read_text() for name in ("probed", "plain")
    )
    losses = [[row.split(",")[2:5] for row in text.splitlines()[1:]] for text in (probed, plain)]
    assert losses[0] == losses[1]
    assert math.isfinite(float(losses[0][0][0]))


def test_the_recipe_saves_and_evaluates(tiny, logged, request):
    page = (request.config.rootpath / "docs/recipes.md").read_text(encoding="utf-8")
    recipe = page.partition("**Ultralytics**")[2].partition("```py\n")[2].partition("```")[0]
    results = []

    class OnHost(ultralytics.YOLO):
        def __init__(self, name):
            super().__init__(tiny / "tiny_model.yaml")

        def train(self, **options):
            return super().train(**{**options, **COMMON, "fraction": 1.0})

    def check(*args, **options):
        options |= {"device": HERE, "progress": "off", "patience": Patience(look_s=0.0)}
        results.append(oomprobe.check(*args, **options))

    def run():
        names = {"torch": torch, "YOLO": OnHost, "folder": str(tiny / "late")}
        exec(
            recipe,
            {
                **names,
                "oomprobe": SimpleNamespace(check=check),
                "result": SimpleNamespace(batch_size=4),
            },
        )
        return results[0].batch_size, results[0].not_covered, [text for _, text in logged]

    size, not_covered, said = beside_the_images(tiny, run)
    assert size == 4
    assert {path.name for path in (tiny / "late").rglob("*.pt")} == {"last.pt", "best.pt"}
    assert any("Validating" in text for text in said)  # the best weights, at the end
    assert any("resuming from a checkpoint, which" in item for item in not_covered)
    assert not any("the last evaluation" in item for item in not_covered)


def test_other_objects_are_refused():
    for model in (ultralytics.YOLO("yolo11n.yaml", verbose=False), torch.nn.Linear(1, 1)):
        with pytest.raises(
            oomprobe.InvalidArgumentError, match=rf"not {type(model).__name__}: pass the \.model"
        ):
            find_max_batch(model, device="cpu:1GiB")
