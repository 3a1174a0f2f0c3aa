# SPDX-License-Identifier: Apache-2.0
"""Types that several threads decode are described before: msgspec crashes if two threads describe one at once."""

from __future__ import annotations

import subprocess
import sys

_CODE = """
import gc, threading
from resctrlmond.api import types
from resctrlmond.api.varlink.messages import Reply
from resctrlmond.client import protocol

def is_described(kind):  # the class refers to its description
    return any(type(one).__name__ == "StructInfo" for one in gc.get_referents(kind))

print(is_described(types.Total))
with protocol._DESCRIBING:
    thread = threading.Thread(target=protocol.result, args=("m", Reply(), types.WorkloadReply), daemon=True)
    thread.start()
    thread.join(0.2)
    print(thread.is_alive())
thread.join()
print(is_described(types.Workload))
"""


def test_only_one_thread_describes_types() -> None:
    output = subprocess.run([sys.executable, "-c", _CODE], check=True, capture_output=True, text=True).stdout
    assert output.split() == ["False", "True", "True"]
