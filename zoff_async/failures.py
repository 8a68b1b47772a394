"""What has gone wrong in an optimizer, and who has been told."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from zoff_async.errors import StepError, TornStateError


class Failures:
    """The first failure since the last recovery. Set on the loop's thread, told in a caller's.

    A failure before a step's first Adam leaves the last step whole: after ``clear`` (``zero_grad()``) work goes on. One
    after it
    leaves the state torn: some parameters have moved and others have not, until a checkpoint is loaded.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.moved: tuple[str, ...] = ()
        self._told = False
        self._lock = threading.Lock()

    @property
    def torn(self) -> bool:
        """Whether some parameters have moved and others have not."""
        return bool(self.moved)

    def record(self, error: BaseException, moved: Sequence[str]) -> None:
        """Keep what failed and which parameters had begun to move."""
        with self._lock:
            self.error, self.moved, self._told = error, tuple(moved), False

    def clear(self) -> None:
        """Forget it: the state is whole (again)."""
        with self._lock:
            self.error, self.moved, self._told = None, (), False

    def tell(self) -> None:
        """Raise a failure that nobody has been told of yet: the very exception."""
        with self._lock:
            error = self.error
            if error is None or self._told:
                return
            self._told = True
        if self.moved:
            error.add_note(f"zoff_async: the update had begun, {some(self.moved)} have moved")
        raise error

    def check(self) -> None:
        """Raise the failure, or on later calls what it means for them."""
        self.tell()
        error = self.error
        if error is None:
            return
        if self.moved:
            raise TornStateError(
                f"an earlier step failed during its update: {some(self.moved)} have moved and the others have not; "
                "load a checkpoint with load_state_dict"
            ) from error
        raise StepError("an earlier step failed before its update: call zero_grad() to go on") from error


def some(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
