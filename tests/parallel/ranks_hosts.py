"""Cases of the integers that hosts tell each other, in memory that they share or over gloo."""

import os
import random
import re
import socket
import struct
import time
from contextlib import suppress
from unittest import mock

import torch.distributed as dist

from moeblaze_cupy.interop.parallel import ExpertGroup, hosts, pages
from tests.parallel.ranks_common import E, Inputs, case, compare, counts_of, expect, results_of
from tests.parallel.ranks_exchange import peers_over_gloo

WORDS = 11
LARGEST = 2**47 - 1
CALLS = 2000


def is_after_another(said, last, size):
    """Of several ranks that wait for the last one, one may fail first. The others name both."""
    return size > 2 and re.search(rf"expected those of ranks \[.*, {last}\], of which \[.*\] have given up", said)


def told_in(call, size):
    """By rank, what it tells in a call."""
    return [[(call * 31 + rank * 7 + place) ** 3 % (LARGEST + 1) for place in range(WORDS)] for rank in range(size)]


@case
def hosts_share_memory(rank, size, group):
    """Ranks run ahead and behind, and leave some calls unread, as after an error. The number of a call begins anew."""
    memory = hosts.share_memory(WORDS, 60, group)
    memory.calls = 2**16 - CALLS // 2
    rng = random.Random(rank)
    for call in range(CALLS):
        if rng.random() < 0.05:
            time.sleep(rng.choice((1e-5, 1e-4, 1e-3, 5e-3)))
        values = told_in(call, size)
        answers = memory.send(values[rank], f"call {call}")
        if rng.random() < 0.9:
            assert answers.read() == values and answers.read() is answers.read()
    before = answers
    memory.send([LARGEST] * WORDS, "the last call").read()
    assert before.read() == told_in(CALLS - 1, size)


@case
def hosts_tell_what_fits(rank, size, group):
    """The other ranks are not told what does not fit, nor is the call counted."""
    memory = hosts.share_memory(WORDS, 60, group)
    for values in ([-1] * WORDS, [LARGEST + 1] + [0] * (WORDS - 1), [0]):
        expected = f"exchange: sizes (call 7): expected {WORDS} integers from 0 to {LARGEST}, got {values}"
        expect(ValueError, expected, memory.send, values, "sizes (call 7)")
    assert memory.send([LARGEST] * WORDS, "sizes").read() == [[LARGEST] * WORDS] * size


@case
def hosts_without_shared_memory(rank, size, group):
    """If a rank has no memory, or the first makes none, or a descriptor is of another file, all go over gloo."""
    last, open_file = rank == size - 1, hosts.open_file

    def fail(*_):
        raise FileNotFoundError

    def short(*_):
        return os.memfd_create("short")

    def of_another(path, name):
        return open_file(f"/proc/self/fd/{other}", name)

    def connected(number):
        found = hosts.connect(number, WORDS, 60, dist.new_group())
        assert isinstance(found, hosts.HostGloo)
        values = told_in(number, size)
        assert found.send(values[rank], "sizes").read() == values

    other = os.memfd_create("other")
    for function in (fail, short, of_another):
        with mock.patch.object(hosts, "open_file", function if last else open_file):
            assert hosts.share_memory(WORDS, 60, group) is None
            assert hosts.connect(1, WORDS, 60, group, only_memory=True) is None
    os.close(other)
    with mock.patch.object(hosts, "open_file", fail if last else open_file):
        connected(10**6)
    with mock.patch.object(hosts.os, "posix_fallocate", fail):
        assert hosts.share_memory(WORDS, 60, group) is None
    with mock.patch.object(hosts.os, "memfd_create", fail), peers_over_gloo():
        connected(10**6 + 1)
        experts = ExpertGroup(dist.new_group(), E, route="pull")
        assert isinstance(experts.hosts, hosts.HostGloo)
        inputs = Inputs(rank, counts_of(size, "uneven"))
        compare(inputs, results_of(inputs, experts), 1e-14)
        experts = ExpertGroup(dist.new_group(), E, route="exact")
        assert experts.hosts is None
        compare(inputs, results_of(inputs, experts), 1e-14)


@case
def hosts_of_groups_that_have_ended(rank, size, group):
    """Their memory is closed when another group is connected."""
    for _ in range(3):
        ended = dist.new_group()
        memory = hosts.connect(1, WORDS, 60, ended)
        assert hosts.connected(ended) is memory
        dist.barrier(group)
        dist.destroy_process_group(ended)
        hosts.connect(1, WORDS, 60, group)
        hosts._hosts.pop(group).close()
        assert hosts.connected(ended) is None
        expect(OSError, "Bad file descriptor", memory.close)


@case
def hosts_give_up(rank, size, group):
    """The last rank is late for the others, who have given up when it comes. Nobody waits for a rank that has."""
    memory = hosts.share_memory(WORDS, 0.3, group)
    values = told_in(0, size)
    assert memory.send(values[rank], "sizes (call 1)").read() == values
    last, others = size - 1, list(range(size - 1))
    if rank == last:
        dist.barrier(group)
    answers = memory.send(values[rank], "sizes (call 2)")
    said = expect(RuntimeError, f"exchange: sizes (call 2): rank {rank} of {size} got no answer", answers.read)
    if rank == last:
        assert f"expected those of ranks {others}, of which {others} have given up" in said
    else:
        assert f"{last}] within 0.3 s, got none" in said or is_after_another(said, last, size)
        dist.barrier(group)
    expect(RuntimeError, said.partition("others: ")[2], answers.read)
    expect(RuntimeError, "sizes (call 3): rank", memory.send, values[rank], "sizes (call 3)")


def waits_for_ended(experts, inputs, size):
    """The call of an ExpertGroup of route "pull" whose last rank has ended raises an error that names it."""
    last, what = size - 1, "exchange: all-gather of sizes (call 2): rank"
    said = expect(RuntimeError, what, results_of, inputs, experts)
    assert f"{last}], of which [{last}] have ended" in said or is_after_another(said, last, size), said


@case
def ranks_swap_descriptors(rank, size, group):
    """Of files that have no name; a rank may be a call ahead. Other processes reach no queue once ranks are connected.

    Before that they fill the queues. The descriptors that they send do not stay open.
    """
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    stranger.setblocking(False)
    names, junk = [], os.memfd_create("junk")
    with_it = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=2i", junk, junk))]
    all_gather = pages.gather_objects

    def names_of(own, group):
        every = all_gather(own, group)
        if not names:
            names.extend(of_rank[rank] for of_rank in every if rank in of_rank)
            for name in names:
                with suppress(BlockingIOError):
                    while True:
                        stranger.sendmsg([b"junk"], with_it, 0, name)
            all_gather(None, group)
        return every

    before = len(os.listdir("/proc/self/fd"))
    with mock.patch.object(pages, "gather_objects", names_of), mock.patch.object(pages, "TIMEOUT_S", 20):
        descriptors = pages.Descriptors(group)
    assert len(names) == size - 1 and len(os.listdir("/proc/self/fd")) == before + size - 1
    for name in names:
        expect(PermissionError, "Operation not permitted", stranger.sendto, b"junk", name)
    for call in range(3):
        own = os.memfd_create("own")
        os.write(own, f"{call} {rank}".encode())
        every = descriptors.swap(own)
        for other, descriptor in enumerate(every):
            assert os.pread(descriptor, 100, 0) == f"{call} {other}".encode()
            os.close(descriptor)
    stranger.close()
    os.close(junk)
