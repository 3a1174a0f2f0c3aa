# SPDX-License-Identifier: Apache-2.0
"""Write metrics to a file for the textfile collector of node_exporter."""

from __future__ import annotations

import contextlib
import logging
import os

from prometheus_client import generate_latest

from resctrlmond.exporter.collector import Exporter

log = logging.getLogger(__name__)

NAME = "resctrlmond.prom"
# node_exporter reads only names that end in ".prom".
_TEMPORARY = f".{NAME}.new"


class Textfile:
    """The file ``resctrlmond.prom`` in a directory. It is replaced as a whole, and has neither times nor starts."""

    def __init__(self, directory: str, exporter: Exporter, timeout_s: float) -> None:
        self._path = os.path.join(directory, NAME)
        self._temporary = os.path.join(directory, _TEMPORARY)
        self._exporter = exporter
        self._timeout_s = timeout_s
        self._failure = ""

    def write(self) -> bool:
        """Replace the file by the present figures. Return whether this succeeded.

        After a failure, which is logged once, there is no file.
        """
        try:
            self._replace(self._render())
        except Exception as error:  # a bug must neither end all later writes nor leave the file
            self._report(error)
            self.remove()
            return False
        if self._failure:
            log.info("%s is written again", self._path)
        self._failure = ""
        return True

    def _report(self, error: Exception) -> None:
        """Log why the file cannot be written, if the last write did not fail for the same reason."""
        why = (error.strerror if isinstance(error, OSError) else "") or repr(error)
        failure = f"cannot write {self._path}: {why}"
        if failure != self._failure:
            if isinstance(error, OSError):
                log.error("%s. Check that the directory exists, can be written to and is not full", failure)
            else:
                log.error("%s", failure, exc_info=error)
        self._failure = failure

    def _render(self) -> bytes:
        # node_exporter has metrics of its own process, and reports an error for each second one with the same name.
        return self._exporter.render(generate_latest, self._timeout_s, with_start_times=False, with_process=False)

    def _replace(self, data: bytes) -> None:
        """Write another file beside the file, and rename it."""
        # Left by an exporter that was killed, or put there by another user who can write to the directory: a link
        # there must not lead the exporter to another file, and a FIFO must not block it.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)
        try:
            with open(self._temporary, "xb") as file:
                file.write(data)
            os.replace(self._temporary, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            raise

    def remove(self) -> None:
        """Remove the file, if possible: node_exporter would serve figures that no longer change."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
