"""A Kubernetes of one node out of programs in a folder, without a registry of images, which leaves nothing behind.

K8S_BIN is that folder. It has `hyperkube` (kube-apiserver, kube-controller-manager, kube-scheduler and kubelet in one
program, called by their names), etcd, containerd with its shim and ctr, the folder `cni` with bridge, host-local and
loopback, `kube-network-policies` (kubernetes-sigs' program of that name, which enforces NetworkPolicies),
`crds.yaml` (Prometheus operator's PodMonitor and PrometheusRule), and `images.tar`: what `docker save` makes of
pause:here, replay-server:VERSION and replay-trainer:VERSION-cpu. runc, dnsmasq and iptables are on the path, and it
runs as root. Names of pods are in a hosts file. Services have no addresses: the chart has only a headless one.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from replay_client.testing import until
from tests.docker.chart import found

NEEDED = ("hyperkube", "etcd", "containerd", "ctr", "cni/bridge", "kube-network-policies", "crds.yaml", "images.tar")
ETCD, PEERS, API, KUBELET = "http://127.0.0.1:12379", "http://127.0.0.1:12380", "https://127.0.0.1:16443", 16250
BRIDGE, GATEWAY = "cni-replay", "10.244.0.1"
NAMESPACE = "replay"
TOKEN = "only-on-this-machine"
VOLUMES = {"runs": "ReadWriteOnce"} | {f"data-{i}": "ReadWriteOncePod" for i in range(3)}
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}


def missing() -> str:
    """Why there can be no cluster here; empty: there can."""
    folder = Path(os.environ.get("K8S_BIN") or "/nowhere")
    lacks = [name for name in NEEDED if not (folder / name).exists()]
    lacks += [name for name in ("runc", "dnsmasq", "iptables", "helm", "kubectl") if found(name) is None]
    return (
        f"needs root and K8S_BIN, a folder as tests/docker/k8s/cluster.py says; missing: {', '.join(lacks)}"
        if lacks
        else ""
    )


class Cluster:
    """Runs until `down`. Its volumes are folders below `folder`: runs, data-0 and others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bin = Path(os.environ["K8S_BIN"]).resolve()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._over = threading.Event()
        self._socket = folder / "containerd.sock"
        os.environ["PATH"] = f"{self._bin}:{os.environ['PATH']}"
        os.environ["KUBECONFIG"] = str(folder / "kubeconfig")

    def up(self) -> None:
        self._control_plane()
        self._node()
        self.apply(*self._objects())
        self.kubectl("apply", "--server-side", "-f", self._bin / "crds.yaml")
        until(lambda: "True" in self._readiness(), "the node is not ready", pause=0.5)

    def _readiness(self) -> str:
        return self.kubectl("get", "nodes", "-o", "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}")

    def kubectl(self, *words: object, text: str | None = None, check: bool = True) -> str:
        """What `kubectl WORDS` prints, in the run's namespace."""
        command = [found("kubectl") or "kubectl", "--namespace", NAMESPACE, *map(str, words)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout + done.stderr

    def get(self, kind: str, *words: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, "-o", "json", *words))["items"]
        return found

    def apply(self, *objects: dict[str, Any]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "-f", "-", text=json.dumps(listed))

    def tag(self, image: str, name: str) -> None:
        """Gives an image of the node another name."""
        prefix = "docker.io/library/"
        self._ctr("images", "tag", "--force", prefix + image, prefix + name)

    def down(self) -> None:
        """Ends pods first: their processes are not ours."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.kubectl("delete", "deployments,statefulsets,jobs,pods", "--all", "--grace-period=5", "--timeout=120s")
        self._over.set()
        for process in reversed(self._processes):
            if process.args[-1] == "containerd":  # type: ignore[index]
                for task in self._ctr("tasks", "ls", "-q").split():
                    self._ctr("tasks", "kill", "--signal", "KILL", task)
            process.terminate()
            process.wait(60)
        for shim in psutil.process_iter(["cmdline"]):
            if str(self._socket) in (shim.info["cmdline"] or []):
                shim.kill()  # a shim whose pod had not ended
        for mount in sorted(Path("/proc/mounts").read_text().splitlines(), reverse=True):
            if str(self.folder) in mount:
                subprocess.run(["umount", "--lazy", mount.split()[1]], capture_output=True)
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True)
        subprocess.run(["iptables", "-w", "-D", "FORWARD", "-i", BRIDGE, "-j", "ACCEPT"], capture_output=True)

    def _ctr(self, *words: object) -> str:
        command = [self._bin / "ctr", "--address", self._socket, "--namespace", "k8s.io", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def _start(self, name: str, *command: object) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            words = list(map(str, command))
            self._processes.append(subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True))

    def _hyperkube(self, name: str, *flags: str) -> None:
        self._start(name, self._bin / "hyperkube", name, *flags)

    def _control_plane(self) -> None:
        pki, config = self.folder / "pki", self.folder / "kubeconfig"
        pki.mkdir()
        subprocess.run(["openssl", "genrsa", "-out", pki / "sa.key", "2048"], check=True, capture_output=True)
        (pki / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
        parts = {
            "clusters": [{"name": "c", "cluster": {"server": API, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        }
        config.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "x", **parts}))
        listen = [f"--{who}-urls={url}" for who, url in (("listen-client", ETCD), ("advertise-client", ETCD))]
        self._start(
            "etcd",
            self._bin / "etcd",
            f"--data-dir={self.folder}/etcd",
            "--unsafe-no-fsync",
            *listen,
            f"--listen-peer-urls={PEERS}",
        )
        issuer = [f"--service-account-{what}-file={pki}/sa.key" for what in ("key", "signing-key")]
        self._hyperkube(
            "kube-apiserver",
            *(
                f"--etcd-servers={ETCD}",
                "--secure-port=16443",
                f"--cert-dir={pki}",
                f"--token-auth-file={pki}/tokens.csv",
            ),
            *("--service-account-issuer=https://kubernetes.default.svc", *issuer, "--authorization-mode=RBAC"),
            *("--service-cluster-ip-range=10.96.0.0/16", "--anonymous-auth=false"),
            "--kubelet-preferred-address-types=InternalIP",
        )
        until(lambda: "ok" in self.kubectl("get", "--raw", "/readyz", check=False), "no API", pause=0.5)
        common = (f"--kubeconfig={config}", "--leader-elect=false")
        keys = (f"--service-account-private-key-file={pki}/sa.key", f"--root-ca-file={pki}/apiserver.crt")
        self._hyperkube("kube-controller-manager", *common, *keys, "--secure-port=16457", f"--cert-dir={pki}/manager")
        self._hyperkube("kube-scheduler", *common, "--secure-port=16459")

    def _objects(self) -> list[dict[str, Any]]:
        """A namespace with the strictest Pod Security, a class of volumes for everybody, and folders as volumes."""
        made: list[dict[str, Any]] = [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": RESTRICTED}},
            {
                "apiVersion": "storage.k8s.io/v1",
                "kind": "StorageClass",
                "metadata": {"name": "folders", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
                "provisioner": "kubernetes.io/no-provisioner",
            },
        ]
        for name, mode in VOLUMES.items():
            path = self.folder / "volumes" / name
            path.mkdir(parents=True)
            os.chown(path, 10001, 10001)
            spec = {"capacity": {"storage": "8Gi"}, "accessModes": [mode], "storageClassName": "folders"}
            where = {"hostPath": {"path": str(path), "type": "Directory"}}
            made.append(
                {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec | where}
            )
        return made

    def _node(self) -> None:
        """containerd, a bridge, a server of names, the enforcer of network policies, and the kubelet."""
        cri = '[plugins."io.containerd.grpc.v1.cri"'
        (self.folder / "containerd.toml").write_text(
            f'version = 2\nroot = "{self.folder}/containerd"\nstate = "{self.folder}/state"\n'
            f'[grpc]\naddress = "{self._socket}"\n'
            f'{cri}]\nsandbox_image = "docker.io/library/pause:here"\nrestrict_oom_score_adj = true\n'
            f'{cri}.cni]\nbin_dir = "{self._bin}/cni"\nconf_dir = "{self.folder}/cni"\n'
            f'{cri}.containerd.runtimes.runc]\nruntime_type = "io.containerd.runc.v2"\n'
            f'{cri}.containerd.runtimes.runc.options]\nBinaryName = "{shutil.which("runc")}"\nSystemdCgroup = false\n'
        )
        self._start(
            "containerd", self._bin / "containerd", "--config", self.folder / "containerd.toml", "--log-level", "warn"
        )
        until(self._socket.exists, "no containerd", pause=0.2)
        self._ctr("images", "import", self._bin / "images.tar")
        (self.folder / "cni").mkdir(exist_ok=True)
        addresses = {"type": "host-local", "dataDir": f"{self.folder}/ipam", "ranges": [[{"subnet": "10.244.0.0/24"}]]}
        bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "hairpinMode": True, "ipam": addresses}
        conflist = {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}
        (self.folder / "cni/pods.conflist").write_text(json.dumps(conflist))
        for command in (
            f"ip link add {BRIDGE} type bridge",
            f"ip addr add {GATEWAY}/24 dev {BRIDGE}",
            f"ip link set {BRIDGE} up",
            f"iptables -w -I FORWARD -i {BRIDGE} -j ACCEPT",
        ):
            subprocess.run(command.split(), check=True)
        (self.folder / "hosts").touch()
        (self.folder / "resolv.conf").write_text(f"nameserver {GATEWAY}\n")
        names = (
            "--no-resolv",
            "--no-hosts",
            f"--addn-hosts={self.folder}/hosts",
            "--conf-file=/dev/null",
            "--pid-file=",
        )
        self._start(
            "dnsmasq", "dnsmasq", "-k", *names, f"--listen-address={GATEWAY}", "--bind-interfaces", "--user=root"
        )
        threading.Thread(target=self._follow_names, args=[self._processes[-1]], daemon=True).start()
        self._start(
            "kube-network-policies",
            self._bin / "kube-network-policies",
            f"--kubeconfig={self.folder}/kubeconfig",
            "--hostname-override=node1",
            "--metrics-bind-address=127.0.0.1:16460",
            "--disable-nri",
            "--fail-open=false",  # so that it removes its rules at its end
        )
        kubelet = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "failSwapOn": False,
            "enforceNodeAllocatable": [],
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "clusterDNS": [GATEWAY],
            "clusterDomain": "cluster.local",
            "port": KUBELET,
            "healthzPort": 16248,
            "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "100Mi"},
            "imageMinimumGCAge": "24h",
            "resolvConf": f"{self.folder}/resolv.conf",
        }
        (self.folder / "kubelet.json").write_text(json.dumps(kubelet))
        flags = (
            f"--kubeconfig={self.folder}/kubeconfig",
            f"--root-dir={self.folder}/kubelet",
            f"--cert-dir={self.folder}/pki/k",
        )
        self._hyperkube(
            "kubelet",
            f"--config={self.folder}/kubelet.json",
            *flags,
            "--hostname-override=node1",
            f"--node-ip={GATEWAY}",
        )

    def _follow_names(self, dnsmasq: subprocess.Popen[bytes]) -> None:
        """In the place of CoreDNS: the names of pods behind headless services, also of those that are not ready."""
        request = urllib.request.Request(
            f"{API}/apis/discovery.k8s.io/v1/endpointslices", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        trusting = ssl._create_unverified_context()
        while not self._over.wait(1.0):
            lines = []
            with suppress(OSError), urllib.request.urlopen(request, context=trusting, timeout=30) as response:
                for each in json.load(response)["items"]:
                    service = each["metadata"].get("labels", {}).get("kubernetes.io/service-name")
                    below = f"{service}.{NAMESPACE}.svc.cluster.local"
                    for end in each.get("endpoints") or []:
                        lines += [f"{end['addresses'][0]} {end['hostname']}.{below}\n"] if "hostname" in end else []
                if "".join(lines) != (self.folder / "hosts").read_text():
                    (self.folder / "hosts").write_text("".join(lines))
                    dnsmasq.send_signal(1)
