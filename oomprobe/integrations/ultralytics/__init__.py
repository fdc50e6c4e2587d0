"""Ultralytics' AutoBatch by running the batch: the real loss and optimizer, worst-case targets, and no line.

`autobatch` and `check_train_batch_size` take what those of ``ultralytics.utils.autobatch`` take, and a device; `install`
makes ``YOLO(...).train(batch=-1)`` use them; `find_max_batch` returns everything that was measured.

Example, which trains with the largest batch whose step runs in 60 % of the free memory of the card::

    from ultralytics import YOLO
    from oomprobe.integrations.ultralytics import install

    with install():
        YOLO("yolo11n.yaml").train(data="coco8.yaml", batch=-1)
"""

from oomprobe.integrations.ultralytics.drop_ins import (
    Installed,
    NoBatchSizeError,
    autobatch,
    check_train_batch_size,
    install,
)
from oomprobe.integrations.ultralytics.probing import find_max_batch

__all__ = ["Installed", "NoBatchSizeError", "autobatch", "check_train_batch_size", "find_max_batch", "install"]
