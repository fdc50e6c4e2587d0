"""The process that forks trials and supervises them; it outlives each of them, and never its parent."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from oomprobe.isolation import child, system
from oomprobe.isolation.offspring import Child
from oomprobe.isolation.spec import Spec
from oomprobe.isolation.wire import Message, Wire

TELLING_CHARACTERS = 4000  # of what a child wrote to stderr that did not die
is_serving = False  # whether this process is a template, or was forked from one


def main(end: int) -> None:
    """Serve the process at the other end of a socket, until it closes that."""
    global is_serving
    is_serving = True
    sys.argv = [""]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    system.adopt_orphans()
    template = Template(Wire(socket.socket(fileno=end)))
    try:
        template.serve()
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a data loader's handler raises when its workers are ended
        template.end()
        system.end_children(set())  # what building the target started
    system.flush()
    os._exit(0)


class Template:
    """Answers its parent, with what its children answer."""

    def __init__(self, parent: Wire) -> None:
        self._parent = parent
        self._spec: Spec | None = None
        self._built: child.Built | None = None
        self._child: Child | None = None

    def serve(self) -> None:
        """Until the parent is gone."""
        while not self._parent.ended:
            for message in self._parent.read():
                self._do(message)

    def _do(self, message: Message) -> None:
        if message["do"] == "build":
            self._spec = Spec.from_message(message["spec"])
            if message["here"]:
                self._tell(self._build(self._spec))
        elif message["do"] == "renew":
            self.end()
        else:
            self._pass_on(message)

    def _build(self, spec: Spec) -> Message:
        own = os.getpid()
        try:
            self._built = child.build(spec)
            gc.collect()
            answer: Message = {"built": True}
        except BaseException as error:
            answer = child.told(error, building=spec.target)
        child.end_copy(own)
        return answer

    def _pass_on(self, message: dict[str, Any]) -> None:
        # Until here nobody looked at the socket; from here on its end tells, and all ends in order.
        system.die_with_parent(0)
        if self._child is None:
            self._child = Child(self._serve_child, self._parent)
        self._tell({"forked": self._child.pid})
        self._child.ask(message["ask"])
        answer = self._child.listen(
            self._parent, left_s=message["left_s"], over_s=message["over_s"], may_be_stuck=message["may_be_stuck"]
        )
        if answer is None:
            return
        if "death" in answer:
            self._child = None
        else:
            answer["stderr"] = self._child.tail.text[-TELLING_CHARACTERS:]
            if message["once"]:
                self.end()
        self._tell(answer)

    def _tell(self, message: Message) -> None:
        with suppress(OSError):  # the parent is gone, which shows itself when it is read from
            self._parent.send(message)

    def _serve_child(self, wire: Wire) -> None:
        spec, built = self._spec, self._built
        assert spec is not None
        if built is None:
            child.serve(wire, lambda: child.Answers.of_target(spec), building=spec.target)
        else:
            child.serve(wire, lambda: child.Answers(built, spec.options))

    def end(self) -> None:
        """End the child, and all that it started."""
        last, self._child = self._child, None
        if last is not None:
            system.end_group(last.pid)
            last.end(why=None)
