"""Any command with a prompt, in a scratch directory: what it has written into the file `answer` gives its reward.

python with_command.py WORD...      a word may have {prompt} in it, and variables of the environment such as {HOME}
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

row = json.loads(sys.stdin.readline())
with tempfile.TemporaryDirectory() as scratch:
    folder = Path(scratch) / "work"
    home = Path(scratch) / "home"
    folder.mkdir()
    home.mkdir()
    variables = {**os.environ, "HOME": str(home)}  # without the settings of whoever runs the tests
    command = []
    for word in sys.argv[1:]:
        command.append(word.format_map({**variables, "prompt": row["prompt"]}))
    subprocess.run(command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, check=True, timeout=240)
    file = folder / "answer"
    made = file.read_text().strip() if file.exists() else None
print(json.dumps({"reward": float(made == row["answer"])}))
