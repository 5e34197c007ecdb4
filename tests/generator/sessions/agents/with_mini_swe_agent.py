"""The package `mini-swe-agent`, as it is: the policy calls a shell, which runs in a scratch directory."""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

row = json.loads(sys.stdin.readline())
scratch = Path(tempfile.mkdtemp())
agent = DefaultAgent(
    LitellmModel(model_name="openai/policy"),
    LocalEnvironment(cwd=str(scratch)),
    system_template="You work in a shell.",
    instance_template="{{task}}",
    step_limit=4,
)
told = agent.run(row["prompt"])
made = (scratch / "answer").read_text().strip() if (scratch / "answer").exists() else None
print(json.dumps({"reward": float(made == row["answer"]), "metrics": {"calls": agent.n_calls}}))
