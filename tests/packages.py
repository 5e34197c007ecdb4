"""Where the packages of the project lie."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "replay_protos": ROOT / "protos/replay_protos",
    "replay_server": ROOT / "replay_server",
    "replay_client": ROOT / "client/replay_client",
    "replay_generator": ROOT / "client/replay_generator",
    "replay_dashboard": ROOT / "client/replay_dashboard",
    "replay_cli": ROOT / "client/replay_cli",
    "replay_trainer": ROOT / "trainer/replay_trainer",
    "replay_adapters": ROOT / "trainer/replay_adapters",
}
