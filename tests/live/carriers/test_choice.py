"""Which way vectors go: chosen by itself, named, forced; and what is enough for sharing memory."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import warnings

import pytest
import torch
import torch.distributed as dist

import offbeat as ob
from offbeat.live.transport import hosts
from tests.support import forge
from tests.support.forge import Job
from tests.support.nets import flat, loss, net, sgd
from tests.support.scenarios import Told, over, scenario

pytestmark = pytest.mark.live

METHODS = (
    ob.eager("everyone"),
    ob.eager(per_node=3),
    ob.wagma(2, 2, "everyone"),
    ob.ad_psgd(),
    ob.allreduce(),
    ob.dpsgd("ring"),
)
SIZE = 3
CLONE_NEWPID, PR_SET_PDEATHSIG = 0x20000000, 1  # of Linux
Seen = tuple[torch.Tensor, tuple[str, ...], str, list[str]]


def trained(rank: int, strategy: ob.Strategy) -> Seen:
    """Weights, carriers, the summary and the warnings of a short run."""
    model = net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ob.attach(sgd(model), model, strategy, patience_s=120) as optimizer:
            for t in range(4):
                optimizer.zero_grad()
                loss(model, rank, t).backward()
                optimizer.step()
    told = [str(w.message) for w in caught]
    return flat(model), optimizer.carriers, str(optimizer.summary()), told


def all_of(rank: int) -> list[Seen]:
    return [trained(rank, strategy) for strategy in METHODS]


@scenario(SIZE)
def by_itself(rank: int) -> list[Seen]:
    return all_of(rank)


@scenario(SIZE)
def each_on_its_own(rank: int) -> list[Seen]:
    return over(rank, "each", all_of)


@scenario(SIZE)
def at_odds(rank: int) -> str:
    """Rank 1 wants another carrier than the others."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv(hosts.VARIABLE, "shm")
        return forge.attempt(lambda: trained(rank, ob.allreduce()))


@scenario(SIZE)
def few_descriptors(rank: int) -> list[Seen]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        return all_of(rank)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_on_one_host_vectors_go_through_shared_memory_and_summary_says_so(told: Told) -> None:
    for out in told(by_itself):
        for _, carriers, summary, warned in out:
            assert carriers == ("shm",)
            assert "Vectors went through shared memory." in summary
            assert not warned


def test_where_each_rank_has_a_host_of_its_own_the_result_is_the_same(told: Told) -> None:
    for here, there in zip(told(by_itself), told(each_on_its_own), strict=True):
        for strategy, (ours, _, _, _), (theirs, carriers, summary, _) in zip(METHODS, here, there, strict=True):
            assert carriers == ("shm", "tcp")
            assert "Vectors went through shared memory and the network." in summary
            if strategy.name != "ad_psgd":  # in which it matters who came when
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def through_memory_as_usual(outs: list[list[Seen]], usual: list[list[Seen]]) -> None:
    """All replicas are equal, and what they are where nothing is in short supply."""
    for out, expected in zip(outs, usual, strict=True):
        for strategy, mine, first, (then, *_) in zip(METHODS, out, outs[0], expected, strict=True):
            weights, carriers, _, warned = mine
            assert (carriers, warned) == (("shm",), [])
            assert torch.equal(weights, first[0])
            if strategy.name != "ad_psgd":
                assert torch.equal(weights, then)


def test_a_limit_of_64_descriptors_is_enough(told: Told) -> None:
    through_memory_as_usual(told(few_descriptors), told(by_itself))


def with_other_pids(rank: int) -> None:
    """Rank 1 is the first process of a PID namespace, which has other numbers for all processes."""
    if rank == 1:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWPID):
            raise OSError(ctypes.get_errno(), "unshare")
        child = os.fork()  # it is in the namespace, and this one is not
        if child:
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 255)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        assert os.getpid() == 1
    dist.init_process_group("gloo")
    forge.note(all_of(rank))
    os._exit(0)  # as the forge ends its workers


def test_workers_in_different_pid_namespaces_share_memory(told: Told) -> None:
    tried = subprocess.run("unshare --pid --fork true", shell=True, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"PID namespaces cannot be made here: {tried.stderr.strip()}")
    (outcomes,) = forge.run([Job(with_other_pids, SIZE)])
    assert [(o.exit_code, o.stderr) for o in outcomes] == [(0, "")] * SIZE
    through_memory_as_usual([outcome.noted[0] for outcome in outcomes], told(by_itself))


def test_a_carrier_that_does_not_exist_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hosts.VARIABLE, "pigeon")
    with pytest.raises(ValueError, match=r"OFFBEAT_CARRIER='pigeon' is no carrier; use shm "):
        hosts.wanted()


def test_a_port_for_other_hosts_can_be_fixed_and_no_port_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(hosts.PORT, "29600")
    assert hosts.port() == 29_600
    monkeypatch.setenv(hosts.PORT, "any")
    with pytest.raises(ob.OffbeatError, match="OFFBEAT_PORT='any' is no port; use a number below 65536"):
        hosts.port()


def test_other_hosts_are_met_at_the_interface_that_gloo_is_told_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert hosts.address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    with pytest.raises(ob.OffbeatError, match="GLOO_SOCKET_IFNAME='none7': no interface of that name"):
        hosts.address()


def test_ranks_that_want_different_carriers_are_refused_on_all_of_them(told: Told) -> None:
    sentence = "the ranks differ in their OFFBEAT_CARRIER: rank 0 has (not set), rank 1 has shm; make them equal"
    assert told(at_odds) == [f"ConfigMismatch: {sentence}"] * SIZE


@scenario(SIZE)
def on_their_own(rank: int) -> dict[str, tuple[torch.Tensor, int, str]]:
    """Runs of self_clocked in which everybody waits for everybody, on one host and on a host for each rank."""
    told = {}
    for host in ("one", str(rank)):
        for coded in ("auto", ob.codec.int8(), None):
            strategy = ob.self_clocked(group=None, wait="everyone", late=0, codec=coded)
            model = net()
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(hosts.NAME, host)
                with ob.attach(sgd(model), model, strategy, patience_s=120) as optimizer:
                    for t in range(4):
                        optimizer.zero_grad()
                        loss(model, rank, t).backward()
                        optimizer.step()
            where = "one host" if host == "one" else "hosts"
            told[f"{where} {coded}"] = flat(model), optimizer.wire_bytes, str(optimizer.summary())
    return told


def test_self_clocked_codes_what_leaves_a_host_and_nothing_else(told: Told) -> None:
    for seen in told(on_their_own):
        asked, auto, none = (
            {where: seen[f"{where} {codec}"] for where in ("one host", "hosts")}
            for codec in (ob.codec.int8(), "auto", None)
        )
        assert torch.equal(auto["one host"][0], none["one host"][0])
        assert torch.equal(asked["one host"][0], none["one host"][0])
        assert torch.equal(auto["hosts"][0], asked["hosts"][0])
        assert not torch.equal(auto["hosts"][0], none["hosts"][0])
        assert auto["hosts"][1] < 0.5 * none["hosts"][1]
        assert all(", coded int8." in said["hosts"][2] for said in (auto, asked))
        assert asked["one host"][2].endswith("shared memory, uncoded: int8 is for what leaves a host.")
        assert all(said["one host"][2].endswith("shared memory.") for said in (auto, none))


INT8 = ob.codec.int8()
MOVING = {
    "self_clocked": ob.self_clocked(group=None, wait="everyone", late=0, codec=INT8),
    "local_sgd": ob.local_sgd(2, codec=INT8),
    "dasgd": ob.dasgd(2, 1, codec=INT8),
    "diloco": ob.diloco(2, overlap=1, codec=INT8),
    "wagma": ob.wagma(2, 2, "everyone", codec=INT8),
    "wagma, correct": ob.wagma(2, 2, "everyone", merge="correct", codec=INT8),
}


@scenario(SIZE)
def moved(rank: int) -> dict[str, list[tuple[torch.Tensor, str]]]:
    """Runs that begin on one host and go on with a host for each rank, the other way round, and on one all the time."""
    out: dict[str, list[tuple[torch.Tensor, str]]] = {name: [] for name in MOVING}
    for name, strategy in MOVING.items():
        for begins, goes_on in (("one", str(rank)), (str(rank), "one"), ("one", "one")):
            model, saved, weights = net(), None, {}
            for host in (begins, goes_on):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setenv(hosts.NAME, host)
                    with ob.attach(sgd(model), model, strategy, patience_s=120) as optimizer:
                        if saved is not None:  # between two averages: each has weights of its own
                            optimizer.load_state_dict(saved)
                            model.load_state_dict(weights)
                        for t in range(3):
                            optimizer.zero_grad()
                            loss(model, rank, t).backward()
                            optimizer.step()
                        saved = optimizer.state_dict()
                        weights = {key: value.clone() for key, value in model.state_dict().items()}
            out[name].append((flat(model), str(optimizer.summary())))
    return out


@pytest.mark.parametrize("name", MOVING)
def test_a_run_that_is_resumed_on_other_hosts_goes_on_with_equal_replicas_and_near_where_it_would_have_been(
    told: Told, name: str
) -> None:
    everyones = [seen[name] for seen in told(moved)]
    for (later_sent, _), (later_not, said), (never, said_then) in everyones:
        assert said.endswith("uncoded: int8 is for what leaves a host.")
        assert said_then.endswith("uncoded: int8 is for what leaves a host.")
        assert torch.equal(later_sent, everyones[0][0][0])
        assert torch.equal(later_not, everyones[0][1][0])
        assert (later_sent - never).abs().max() < 1e-2
        assert (later_not - never).abs().max() < 1e-2
