"""Who gets in: tokens and their roles, TLS and mutual TLS, over real sockets, and what those hear who do not."""

import itertools
import os
import struct
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import grpc
import pytest

from replay_client import TLS, ReplayClient
from replay_client.access import Access
from replay_client.errors import AuthenticationError, ReplayError, ServerUnavailableError, UnsupportedError
from replay_client.testing import make_group, until
from replay_protos import replay_pb2 as pb
from replay_protos.framing import SERVICE
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import AdmissionConfig, ReplayServer, SecurityConfig, TableConfig
from replay_server.rpc.auth import ROLES, Role
from tests.certificates import make_certificate
from tests.kit.processes import fails, run_replay, server_process, start_server
from tests.server.rpc.calls import Requests

PLAIN = "[[tables]]\nname = 'plain'\n"
METHODS = list(pb.DESCRIPTOR.services_by_name["Replay"].methods)
TABLES = [TableConfig(name="plain", sampler="fifo")]
TOKENS = {role: f"{role}-token-0123456789abcdef" for role in Role}
WRONG = "wrong-token-0123456789abcdef"
Code = grpc.StatusCode


@contextmanager
def server_with(**security):
    section = SecurityConfig(**security)
    admission = AdmissionConfig(fresh_groups_per_step=100, max_staleness=1)
    with ReplayServer(tables=TABLES, port=0, security=section, admission=admission) as server:
        yield server


@pytest.fixture
def tokens_file(tmp_path):
    path = tmp_path / "tokens"
    write_tokens(path, TOKENS)
    return path


def write_tokens(path: Path, tokens: dict[Role, str]) -> None:
    """As a rotation does it: written beside, renamed into place."""
    beside = path.with_suffix(".new")
    beside.write_text("# made by a test\n" + "".join(f"{role}:{token}\n" for role, token in tokens.items()))
    beside.chmod(0o600)
    beside.rename(path)


@pytest.fixture
def server(tokens_file):
    with server_with(tokens_file=tokens_file) as server:
        yield server


def code_of(address: str, method: str, *metadata: tuple[str, str]) -> grpc.StatusCode:
    """The status of a call with an empty request; of a stream of requests, with none at all."""
    with grpc.insecure_channel(address) as channel:
        kind = pb.DESCRIPTOR.services_by_name["Replay"].methods_by_name[method]
        path = f"/{SERVICE}/{method}"
        try:
            if not kind.server_streaming:
                channel.unary_unary(path)(b"", timeout=60, metadata=metadata)
            elif kind.client_streaming:
                list(channel.stream_stream(path)(iter(()), timeout=60, metadata=metadata))
            else:
                next(channel.unary_stream(path)(b"", timeout=60, metadata=metadata))
        except grpc.RpcError as error:
            return error.code()
        return Code.OK


def bearer(token: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {token}")


# ------------------------------------------------------------------------------------------------ tokens


@pytest.mark.parametrize("method", [method.name for method in METHODS])
def test_each_method_takes_its_role_and_those_above_it_and_no_other(server, method):
    assert code_of(server.address, method) is Code.UNAUTHENTICATED
    assert code_of(server.address, method, bearer(WRONG)) is Code.UNAUTHENTICATED
    for role, token in TOKENS.items():
        code = code_of(server.address, method, bearer(token))
        if role < ROLES[method]:
            assert code is Code.PERMISSION_DENIED, role
        else:
            assert code not in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED), role


def test_a_method_that_nobody_thought_of_wants_the_role_above_all(server):
    for path in (f"/{SERVICE}/Nothing", "/grpc.channelz.v1.Channelz/GetServers", "nonsense"):
        with grpc.insecure_channel(server.address) as channel:
            for role, expected in ((Role.READ_WRITE, Code.PERMISSION_DENIED), (Role.ADMIN, Code.UNIMPLEMENTED)):
                with pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary(path)(b"", timeout=60, metadata=[bearer(TOKENS[role])])
                assert caught.value.code() is expected, path


ADMIN = TOKENS[Role.ADMIN]


@pytest.mark.parametrize(
    "metadata",
    [
        [("authorization", ADMIN)],
        [("authorization", f"Basic {ADMIN}")],
        [("authorization", f"Bearer {ADMIN}x")],
        [("authorization", f"Bearer {ADMIN[:-1]}")],
        [("authorization", f"Bearer {ADMIN.upper()}")],
        [("authorization", "Bearer ")],
        [("authorization", "")],
        [("authorization", f"Bearer {Role.ADMIN}:{ADMIN}")],
        [bearer(WRONG), bearer(ADMIN)],
        [bearer(ADMIN), bearer(WRONG)],
        [("x-authorization", f"Bearer {ADMIN}")],
    ],
    ids=str,
)
def test_what_is_nearly_a_token_is_none(server, metadata):
    assert code_of(server.address, "GetPolicy", *metadata) is Code.UNAUTHENTICATED


def test_the_scheme_of_the_header_may_be_in_any_case(server):
    assert code_of(server.address, "GetPolicy", ("authorization", f"bearer {ADMIN}")) is Code.OK


def test_a_refused_stream_ends_before_anything_of_it_is_read(server):
    with grpc.insecure_channel(server.address) as channel, Requests() as requests:
        call = channel.stream_stream(f"/{SERVICE}/Draw")(iter(requests), timeout=60)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is Code.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (None, ["wants a token", "REPLAY_TOKEN"]),
        (WRONG, ["not one of this server's", "tokens_file"]),
        (TOKENS[Role.READ_ONLY], ["Reset needs a token of the role admin", "this one is read-only"]),
        (TOKENS[Role.READ_WRITE], ["Reset needs a token of the role admin", "this one is read-write"]),
    ],
)
def test_a_refusal_says_what_to_do(server, token, words):
    with ReplayClient(server.address, timeout=60.0, token=token) as client:
        with pytest.raises(AuthenticationError) as caught:
            client.reset("plain")
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert "\n" not in message
        assert token is None or token not in message


def test_a_writer_and_a_sampler_without_a_token_end_at_once_with_the_reason(server):
    with ReplayClient(server.address, timeout=60.0) as client:
        writer = client.writer()
        writer.insert(b"x", {"plain": 1.0})
        with pytest.raises(AuthenticationError, match="wants a token"):
            writer.flush()
        writer.close()
        with pytest.raises(AuthenticationError, match="wants a token"):
            next(client.sampler("plain"))
        with pytest.raises(AuthenticationError, match="wants a token"):
            next(client.watch_policy())


def use_everything(client: ReplayClient) -> None:
    """One of each kind of call."""
    group = make_group()
    key = client.insert(group, {"plain": 1.0})
    assert client.sample("plain", 1)[0].group == group
    with client.writer() as writer:
        writer.insert(bytes(3 << 20), {"plain": 1.0})
    with client.sampler("plain", batch_size=1) as sampler:
        assert next(sampler)[0].info.key == key
    assert client.get([key])[0].group == group
    assert client.list_items("plain").matching == 2
    client.update_priorities("plain", {key: 2.0})
    client.release_permits(client.acquire_permits(1))
    client.set_policy_version(3, "weights")
    assert next(client.watch_policy()).version == 3
    with pytest.raises(UnsupportedError):
        client.create_checkpoint()
    assert client.update_table("plain", max_size=10).size == 2
    assert client.delete("plain", [key]).applied == 1
    assert client.reset("plain") == 1


def until_code(address: str, expected: grpc.StatusCode, token: str) -> None:
    until(lambda: code_of(address, "GetPolicy", bearer(token)) is expected, pause=0.1)


def test_tokens_are_exchanged_while_the_server_runs(server, tokens_file, caplog):
    write_tokens(tokens_file, {Role.ADMIN: "another-token-0123456789"})
    until_code(server.address, Code.OK, "another-token-0123456789")
    assert code_of(server.address, "GetPolicy", bearer(ADMIN)) is Code.UNAUTHENTICATED
    written_at = tokens_file.stat().st_mtime_ns
    tokens_file.write_text("nonsense-without-a-role\n")
    os.utime(tokens_file, ns=(written_at, written_at))  # as a file that is written twice in one tick of the clock

    def is_read_again() -> bool:  # a call makes the server look at the file
        assert code_of(server.address, "GetPolicy", bearer("another-token-0123456789")) is Code.OK
        return f"{tokens_file}, line 1" in caplog.text

    until(is_read_again, pause=0.1)
    assert "nonsense" not in caplog.text


def test_a_revoked_token_ends_the_calls_that_are_open_with_it_and_no_others(server, tokens_file):
    with grpc.insecure_channel(server.address) as channel, Requests() as none:
        stub = ReplayStub(channel)
        of_writer, of_reader = [bearer(TOKENS[Role.READ_WRITE])], [bearer(TOKENS[Role.READ_ONLY])]
        table = TABLES[0].name
        draw = Requests(pb.DrawRequest(draw=pb.SampleRequest(table=table, num_samples=1, id=1 << 40)))
        calls = [
            stub.WatchPolicy(pb.GetPolicyRequest(), metadata=of_writer),
            stub.Draw(iter(draw), metadata=of_writer),
            stub.InsertStream(iter(none), metadata=of_writer),
            stub.Sample(pb.SampleRequest(table=table, num_samples=1), metadata=of_writer),  # waits for ever
        ]
        watch = stub.WatchPolicy(pb.GetPolicyRequest(), metadata=of_reader)
        next(watch)
        with ReplayClient(server.address, timeout=60.0, token=ADMIN) as admin:
            until(lambda: (info := admin.server_info()).insert_streams == info.sample_streams == 1)
            until(lambda: admin.server_info().tables[table].sampling.count == 2)
        write_tokens(tokens_file, {Role.READ_ONLY: TOKENS[Role.READ_ONLY]})
        for call in calls:
            with pytest.raises(grpc.RpcError) as refusal:
                list(call)
            assert refusal.value.code() is Code.UNAUTHENTICATED
        assert watch.is_active()
        draw.put(None)


def test_a_revoked_token_ends_a_stream_of_short_calls_that_is_never_idle(tokens_file, tmp_path):
    """Each call waits for the disk. So the token is revoked in the middle of one, and more have come behind it."""
    table = TABLES[0].name

    def updates():
        for n in itertools.count():
            update = pb.UpdatePrioritiesRequest(
                table=table, keys=(7).to_bytes(8, "little"), priorities=struct.pack("<d", n)
            )
            yield pb.CallRequest(method="UpdatePriorities", request=update.SerializeToString())

    section, writer = SecurityConfig(tokens_file=tokens_file), TOKENS[Role.READ_WRITE]
    with ReplayServer(tables=TABLES, port=0, security=section, data_dir=tmp_path / "data") as server:
        with ReplayClient(server.address, token=writer) as client:
            client.insert(b"x", {table: 1.0}, key=7)
        with grpc.insecure_channel(server.address) as channel:
            answers = ReplayStub(channel).Multiplex(updates(), timeout=120, metadata=[bearer(writer)])
            next(answers)
            write_tokens(tokens_file, {Role.READ_ONLY: TOKENS[Role.READ_ONLY]})
            with pytest.raises(grpc.RpcError) as refusal:
                assert next(filter(attrgetter("code"), answers))
            assert refusal.value.code() is Code.UNAUTHENTICATED


@pytest.mark.parametrize(
    "text", ["", "# only a comment\n", "secret-one\n", "root:secret-one\n", "admin:\n", "admin:secrét-one\n"]
)
def test_a_file_of_tokens_that_cannot_be_used_is_named_and_not_shown(tmp_path, text):
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ValueError, match=str(path)) as caught:
        ReplayServer(tables=TABLES, port=0, security=SecurityConfig(tokens_file=path))
    assert "secr" not in str(caught.value)


def test_nothing_that_a_read_only_token_may_call_changes_anything(tokens_file):
    """On a server that is full, keeps a consumed row for a rollback, and has an insert that waits."""
    tables = [
        TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 1}, retain_consumed=1),
        TableConfig(name="pool", when_full="block"),
    ]
    security = SecurityConfig(tokens_file=tokens_file)
    reads = {
        "GetServerInfo": pb.GetServerInfoRequest(),
        "ListItems": pb.ListItemsRequest(table="queue"),
        "Get": pb.GetRequest(keys=[1, 2, 3]),
        "GetPolicy": pb.GetPolicyRequest(),
        "WatchPolicy": pb.GetPolicyRequest(),
        "ListCheckpoints": pb.ListCheckpointsRequest(),
        "ShareMemory": iter([pb.ShareMemoryRequest(open=1 << 20)]),
    }
    assert reads.keys() == {method for method, role in ROLES.items() if role is Role.READ_ONLY}
    with (
        ReplayServer(tables=tables, port=0, security=security, max_bytes=4500) as server,
        ReplayClient(server.address, timeout=60.0, token=TOKENS[Role.READ_WRITE]) as client,
        grpc.insecure_channel(server.address) as channel,
    ):

        def facts() -> list[object]:
            info = client.server_info()
            of_tables = [(each.retained, each.retained_bytes, each.size, each.inserts) for each in info.tables.values()]
            items = [item for name in info.tables for item in client.list_items(name).items]
            return [info.bytes, of_tables, [replace(item, age=0.0) for item in items]]

        client.set_policy_version(1, "weights", state="saved")
        client.insert(bytes(2000), {"queue": 1.0}, key=1)
        client.sample("queue")
        client.insert(bytes(1000), {"queue": 1.0}, key=2)
        with client.writer() as writer:
            writer.insert(bytes(2000), {"pool": 1.0, "queue": 1.0}, key=3)
            until(lambda: client.server_info().tables["queue"].inserting.count == 1)
            assert [each.retained for each in client.server_info().tables.values()] == [1, 0]
            before = facts()
            for method, request in reads.items():
                with suppress(grpc.RpcError):  # no checkpoints here
                    answer = getattr(ReplayStub(channel), method)(
                        request, timeout=60, metadata=[bearer(TOKENS[Role.READ_ONLY])]
                    )
                    if isinstance(answer, grpc.Call):
                        next(answer)
            assert before == facts()
            assert "max_diff" in str(client.server_info().tables["queue"].inserting.reason)
            client.sample("queue")


# ------------------------------------------------------------------------------------------------ TLS


@pytest.fixture
def pki(tmp_path):
    """An authority, what it signed, and one that nobody trusts."""
    ca, other = make_certificate(tmp_path, "ca"), make_certificate(tmp_path, "other-ca")
    return {
        "ca": ca,
        "other ca": other,
        "server": make_certificate(tmp_path, "server", ca),
        "expired": make_certificate(tmp_path, "expired", ca, days=-1),
        "elsewhere": make_certificate(tmp_path, "elsewhere", ca, names=("replay.example",)),
        "client": make_certificate(tmp_path, "client", ca),
        "stranger": make_certificate(tmp_path, "stranger", other),
    }


def tls_server(pki, name: str = "server", client_ca: str | None = None, **security):
    files = {"tls_cert": pki[name].cert, "tls_key": pki[name].key}
    if client_ca:
        files["tls_client_ca"] = pki[client_ca].cert
    return server_with(**files, **security)


def client_tls(pki, ca: str | None, name: str | None = None, server_name: str | None = None) -> TLS:
    return TLS(
        ca=pki[ca].cert if ca else None,
        cert=pki[name].cert if name else None,
        key=pki[name].key if name else None,
        server_name=server_name,
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_whole_client_works_over_tls_with_both_certificates_and_a_token(pki, tokens_file, host):
    with tls_server(pki, client_ca="ca", tokens_file=tokens_file) as server:
        address = f"{host}:{server.address.rpartition(':')[2]}"
        with ReplayClient(address, timeout=60.0, token=ADMIN, tls=client_tls(pki, "ca", "client")) as client:
            use_everything(client)
        with (
            ReplayClient(address, timeout=60.0, tls=client_tls(pki, "ca", "client")) as client,
            pytest.raises(AuthenticationError, match="wants a token"),
        ):
            client.policy()


def test_a_certificate_for_another_name_is_accepted_where_that_name_is_expected(pki):
    with tls_server(pki, "elsewhere") as server:
        tls = client_tls(pki, "ca", server_name="replay.example")
        with ReplayClient(server.address, timeout=60.0, tls=tls) as client:
            assert client.policy().version == 0


@pytest.mark.parametrize(
    ("cert", "tls", "words"),
    [
        ("server", {"ca": "other ca"}, ["cannot be trusted", "other-ca.pem", "REPLAY_TLS_CA"]),
        ("server", {"ca": None}, ["cannot be trusted", "REPLAY_TLS_CA"]),
        ("expired", {"ca": "ca"}, ["certificate has expired", "renew the server's"]),
        ("elsewhere", {"ca": "ca"}, ["another name", "REPLAY_TLS_SERVER_NAME"]),
        (None, {"ca": "ca"}, ["does not use TLS", "leave out tls"]),
    ],
    ids=["wrong authority", "public authorities", "expired", "other name", "server without TLS"],
)
def test_a_server_that_cannot_be_trusted_is_an_error_at_once(pki, cert, tls, words):
    with tls_server(pki, cert) if cert else server_with() as server:
        with (
            # A call without a deadline ends only because the error ends it.
            ReplayClient(server.address, timeout=None, tls=client_tls(pki, **tls)) as client,
            pytest.raises(AuthenticationError) as caught,
        ):
            client.policy()
        assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("client_ca", "tls", "words"),
    [
        (None, None, "try tls=... (REPLAY_TLS_CA, --tls-ca)"),
        ("ca", {"ca": "ca"}, "try tls_cert and tls_key (REPLAY_TLS_CERT, REPLAY_TLS_KEY)"),
        ("ca", {"ca": "ca", "name": "stranger"}, "tls_client_ca must be the authority that signed that one"),
    ],
    ids=["client without TLS", "no client certificate", "client certificate of a stranger"],
)
def test_a_server_that_hangs_up_leads_to_what_it_may_want(pki, client_ca, tls, words):
    with (
        tls_server(pki, client_ca=client_ca) as server,
        ReplayClient(server.address, timeout=3.0, tls=client_tls(pki, **tls) if tls else False) as client,
        pytest.raises(ServerUnavailableError) as caught,
    ):
        client.policy()
    assert words in str(caught.value)


def test_certificates_are_exchanged_while_the_server_runs(pki, tmp_path, caplog):
    current = make_certificate(tmp_path, "current", pki["ca"])
    pki["current"] = current
    with tls_server(pki, "current") as server:

        def works(ca: str) -> bool:
            with ReplayClient(server.address, timeout=60.0, tls=client_tls(pki, ca)) as client:
                try:
                    return client.policy().version == 0
                except AuthenticationError:
                    return False

        assert works("ca")
        make_certificate(tmp_path, "current", pki["other ca"])
        until(lambda: works("other ca"))
        current.cert.write_text("nonsense")
        until(lambda: works("other ca") and f"{current.cert} holds no certificate" in caplog.text)
        assert works("other ca")


GARBAGE = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("setting", "file", "words"),
    [
        pytest.param("tls_cert", "nowhere", "cannot be read: No such file", id="no cert file"),
        pytest.param("tls_key", "nowhere", "cannot be read: No such file", id="no key file"),
        pytest.param("tls_client_ca", "nowhere", "cannot be read: No such file", id="no ca file"),
        pytest.param("tls_cert", "garbage", "holds no certificate", id="cert is a key"),
        pytest.param("tls_key", "server.pem", "holds no private key", id="key is a cert"),
        pytest.param("tls_key", "garbage", "holds no private key", id="key is damaged"),
        pytest.param("tls_key", "client.key", "is not the key of tls_cert .*server.pem", id="key of another"),
        pytest.param("tls_client_ca", "garbage", "holds no certificate", id="ca is a key"),
        pytest.param("tls_cert", "", "cannot be read: Is a directory", id="folder"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_error_at_both_ends(pki, tmp_path, setting, file, words):
    (tmp_path / "garbage").write_text(GARBAGE)
    files = {"tls_cert": pki["server"].cert, "tls_key": pki["server"].key, "tls_client_ca": pki["ca"].cert}
    files[setting] = tmp_path / file
    line = f"{setting.removeprefix('tls_client_')} .*{file} {words}"
    with pytest.raises(ValueError, match=line) as at_server:
        ReplayServer(tables=TABLES, port=0, security=SecurityConfig(**files))
    with pytest.raises(ValueError, match=line) as at_client:
        ReplayClient("h:1", tls=TLS(ca=files["tls_client_ca"], cert=files["tls_cert"], key=files["tls_key"]))
    for caught in (at_server, at_client):
        assert "\n" not in str(caught.value)
        assert "c2VjcmV0" not in str(caught.value)


@pytest.mark.parametrize(
    ("security", "words"),
    [
        ({"tls_cert": "server.pem"}, "tls_cert is set and tls_key is not"),
        ({"tls_key": "server.key"}, "tls_key is set and tls_cert is not"),
        ({"tls_client_ca": "ca.pem"}, "needs tls_cert and tls_key"),
    ],
)
def test_half_a_configuration_is_refused(tmp_path, security, words):
    files = {name: tmp_path / value for name, value in security.items()}
    with pytest.raises(ValueError, match=words):
        ReplayServer(tables=TABLES, port=0, security=SecurityConfig(**files))


# ------------------------------------------------------------------------------------------------ the client's settings


def test_a_token_goes_to_other_machines_only_over_tls(pki):
    with pytest.raises(ValueError, match=r"unencrypted.*allow_insecure_token") as caught:
        ReplayClient("replay.example:7400", token=ADMIN)
    assert ADMIN not in str(caught.value)
    ReplayClient("replay.example:7400", token=ADMIN, allow_insecure_token=True).close()
    ReplayClient("replay.example:7400", token=ADMIN, tls=client_tls(pki, "ca")).close()
    for loopback in ("127.0.0.1:1", "127.8.8.8:1", "localhost:1", "[::1]:1"):
        ReplayClient(loopback, token=ADMIN).close()


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "ünï", "tab\there"])
def test_a_token_that_no_header_can_carry_is_refused_without_showing_it(token):
    with pytest.raises(ValueError, match="token must hold one token") as caught:
        ReplayClient("127.0.0.1:1", token=token)
    assert not token or token not in str(caught.value)


def test_settings_come_from_arguments_then_the_environment_then_the_file(tmp_path):
    (tmp_path / "token").write_text("from-the-file\n")
    config = tmp_path / "client.toml"
    config.write_text(f'address = "c:1"\ntoken_file = "{tmp_path / "token"}"\nallow_insecure_token = true\n')
    file = {"REPLAY_CLIENT_CONFIG": str(config)}
    found = Access.find(environment=file)
    assert found.address == "c:1"
    assert found.token == "from-the-file"
    assert found.tls is None
    found = Access.find(environment=file | {"REPLAY_ADDRESS": "e:2", "REPLAY_TOKEN": "from-the-environment"})
    assert found.address == "e:2"
    assert found.token == "from-the-environment"
    found = Access.find(environment=file | {"REPLAY_ADDRESS": "e:2", "REPLAY_TOKEN": "x"}, address="a:3", token="given")
    assert found.address == "a:3"
    assert found.token == "given"
    assert Access.find(environment={}) == Access("127.0.0.1:7400")
    assert Access.find(environment={"REPLAY_TLS": "1"}).tls == TLS()
    assert Access.find(environment={"REPLAY_TLS": "0", "REPLAY_TLS_CA": "nowhere"}).tls is None


@pytest.mark.parametrize(
    ("environment", "config", "words"),
    [
        ({"REPLAY_TOKEN": "a", "REPLAY_TOKEN_FILE": "b"}, "", "both REPLAY_TOKEN and REPLAY_TOKEN_FILE are set"),
        ({"REPLAY_TOKEN_FILE": "/nowhere"}, "", "REPLAY_TOKEN_FILE /nowhere cannot be read: No such file"),
        ({"REPLAY_TOKEN": "se cret"}, "", "REPLAY_TOKEN must hold one token"),
        ({"REPLAY_TLS_CA": "/nowhere"}, "", "tls_ca /nowhere cannot be read"),
        ({"REPLAY_TLS": "maybe"}, "", "REPLAY_TLS must be 1 or 0, not 'maybe'"),
        ({"REPLAY_ADDRESS": "nowhere"}, "", "REPLAY_ADDRESS must be host:port"),
        ({}, "tokn = 'secret'", "no setting tokn"),
        ({}, "token = 5", "token has a value of the wrong type"),
        ({}, "token = ", "client.toml"),
    ],
)
def test_a_bad_setting_is_named_and_no_secret_is_shown(tmp_path, environment, config, words):
    path = tmp_path / "client.toml"
    path.write_text(config)
    with pytest.raises(ValueError, match=words) as caught:
        Access.find(environment=environment, client_config=str(path))
    assert "secret" not in str(caught.value)
    assert "se cret" not in str(caught.value)


def test_no_representation_shows_the_token():
    with ReplayClient("127.0.0.1:1", token=ADMIN) as client:
        shown = [repr(client), repr(Access.find(environment={}, token=ADMIN))]
        assert not any(ADMIN in text for text in shown)


# ------------------------------------------------------------------------------------------------ the process


def test_no_token_shows_in_logs_or_process_lists_and_commands_take_it_from_the_environment(tmp_path):
    tokens = " ".join(f"{role}:{token}" for role, token in TOKENS.items())
    log, loudly = tmp_path / "log", ("--log-level", "debug")
    with (
        log.open("w") as stderr,
        server_process(tmp_path, PLAIN, options=loudly, stderr=stderr, REPLAY_TOKENS=tokens) as server,
    ):
        address = server.address
        for token in (ADMIN, WRONG):
            with ReplayClient(address, timeout=60.0, token=token) as client:
                for call in (client.policy, lambda: client.reset("nope"), lambda: client.update_table("plain", a=1)):
                    with suppress(ReplayError):
                        call()
        shown = run_replay("--address", address, "tables", REPLAY_TOKEN=TOKENS[Role.READ_ONLY])
        assert shown.returncode == 0
        assert shown.stderr == ""
        refused = fails("--address", address, "tables")
        assert refused.startswith("replay: this server wants a token")
        command_line = Path(f"/proc/{server.process.pid}/cmdline").read_text()
        server.process.terminate()
        server.process.wait()
    text = log.read_text() + command_line + shown.stdout + refused
    assert "refused 1 call" in text
    for secret in (*TOKENS.values(), WRONG):
        assert secret not in text


def test_a_process_serves_tls_from_its_file_and_commands_find_it_by_their_options(tmp_path, pki, tokens_file):
    (tmp_path / "token").write_text(TOKENS[Role.READ_ONLY])
    config = f"""{PLAIN}
[security]
tls_cert = "{pki["server"].cert}"
tls_key = "{pki["server"].key}"
tokens_file = "{tokens_file}"
"""
    with server_process(tmp_path, config) as server:
        flags = ("--address", server.address, "--tls-ca", str(pki["ca"].cert), "--token-file", str(tmp_path / "token"))
        shown = run_replay(*flags, "tables")
        assert shown.returncode == 0
        assert shown.stderr == ""
        assert "plain" in shown.stdout
        assert "cannot be trusted" in fails(*flags[:2], "--tls-ca", str(pki["other ca"].cert), *flags[4:], "tables")


def test_files_that_everybody_can_read_are_warned_about(pki, tokens_file, caplog):
    with tls_server(pki, tokens_file=tokens_file):
        assert "can be read by every user" not in caplog.text
    tokens_file.chmod(0o644)
    pki["server"].key.chmod(0o644)
    with tls_server(pki, tokens_file=tokens_file):
        assert f"tokens_file {tokens_file} can be read by every user" in caplog.text
        assert f"tls_key {pki['server'].key} can be read by every user" in caplog.text


def test_an_address_that_others_reach_is_warned_about_as_far_as_it_is_open(pki, tokens_file, caplog):
    def warnings(host: str, **security) -> list[str]:
        caplog.clear()
        with ReplayServer(tables=TABLES, port=0, host=host, security=SecurityConfig(**security)):
            words = ("without tokens", "without TLS", "tokens included")
            return [word for word in words if word in caplog.text]

    tls = {"tls_cert": pki["server"].cert, "tls_key": pki["server"].key}
    assert warnings("127.0.0.1") == []
    assert warnings("0.0.0.0", insecure=True) == ["without tokens", "without TLS"]
    assert warnings("0.0.0.0", tokens_file=tokens_file) == ["without TLS", "tokens included"]
    assert warnings("0.0.0.0", **tls, insecure=True) == ["without tokens"]
    assert warnings("0.0.0.0", **tls, tls_client_ca=pki["ca"].cert) == []
    assert warnings("0.0.0.0", **tls, tokens_file=tokens_file) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "replay.example.com"])
@pytest.mark.parametrize("with_tls", [False, True])
def test_an_address_that_others_reach_is_refused_without_tokens_unless_it_is_meant(pki, host, with_tls):
    tls = {"tls_cert": pki["server"].cert, "tls_key": pki["server"].key} if with_tls else {}
    says = r"refusing to listen on .*:0 without tokens: .*tokens_file in \[security\], .*--insecure"
    with pytest.raises(ValueError, match=says), ReplayServer(TABLES, 0, host, security=SecurityConfig(**tls)):
        pass


def test_the_command_refuses_an_open_address_in_one_line_and_takes_it_if_told(tmp_path, tokens_file):
    said = fails("serve", "--listen", "0.0.0.0:0")
    assert "refusing to listen on 0.0.0.0:0 without tokens" in said
    for options, variables in (
        (("--insecure",), {}),
        ((), {"REPLAY_TOKENS_FILE": str(tokens_file)}),
    ):
        server = start_server(None, *options, address="0.0.0.0:0", **variables)
        assert server.address.startswith("0.0.0.0:")
        server.kill()


@pytest.mark.parametrize(("address", "warned"), [("127.0.0.1:0", False), ("localhost:0", False), ("0.0.0.0:0", True)])
def test_metrics_that_others_reach_are_warned_about_since_they_want_no_token(address, warned, tokens_file, caplog):
    security = SecurityConfig(tokens_file=tokens_file)
    with ReplayServer(tables=TABLES, port=0, security=security, metrics_listen=address) as server:
        assert (f"{server.metrics_address}/metrics, without tokens" in caplog.text) == warned
