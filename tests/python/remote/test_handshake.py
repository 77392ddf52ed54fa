"""The handshake of a connection to another machine: each end proves that it knows the secret, and nothing is unpickled
before that."""

import json
import os
import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from rustloader.remote import handshake
from rustloader.remote.context import Call
from rustloader.workers import remote

TOKEN, OTHER = bytes(range(32)), bytes(32)
WORKER, PID = 3, 4711
SECONDS = 20.0
JOB = b"job"


@pytest.fixture
def pair():
    """A function that returns two connected sockets, which are closed at the end of the test."""
    sockets = []

    def make():
        sockets.extend(socket.socketpair())
        return sockets[-2:]

    yield make
    for end in sockets:
        end.close()


@pytest.fixture
def in_background():
    """A function that runs another function in a thread."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda *args: pool.submit(*args)


def deadline(seconds=SECONDS):
    return time.monotonic() + seconds


def as_main(connection, token=TOKEN, worker_id=WORKER):
    """Runs the main process's end; returns the pid of the worker, or None for a stranger."""
    pid = handshake.authenticate_worker(connection, token, worker_id, deadline())
    if pid is not None:
        handshake.send_reply(connection, True, JOB, deadline())
    return pid


def as_worker(connection, token=TOKEN, seconds=SECONDS):
    """Runs the worker's end; returns the reply of the main process after both proofs, or an error."""
    try:
        handshake.introduce(connection, token, WORKER, PID, deadline(seconds))
        return handshake.receive_reply(connection, deadline(seconds))
    except (handshake.HandshakeError, OSError) as error:
        return error


def facing(pair, end, data):
    """Sends only `data` to an end; returns the result of the end, and what it sends itself."""
    mine, other = pair()
    other.sendall(data)
    other.shutdown(socket.SHUT_WR)
    result = end(mine)
    mine.shutdown(socket.SHUT_WR)
    return result, other.recv(10_000)


def handshake_of(pair, in_background, monkeypatch):
    """Returns the bytes that the main process and the worker send in a handshake that succeeds."""
    main, worker = pair()
    sent = []
    send = handshake._send
    with monkeypatch.context() as patch:
        patch.setattr(handshake, "_send", lambda *args: (sent.append(args[1]), send(*args)))
        other = in_background(as_worker, worker)
        assert as_main(main) == PID
        assert other.result(SECONDS) == JOB
    challenge, hello, proof, answer = sent
    return challenge + proof + answer, hello


@pytest.fixture
def transcript(pair, in_background, monkeypatch):
    """The bytes that both ends send, with nonces that are the same in all handshakes of the test."""
    monkeypatch.setattr(handshake, "secrets", SimpleNamespace(token_bytes=lambda count: b"\7" * count))
    sent = handshake_of(pair, in_background, monkeypatch)
    assert facing(pair, as_worker, sent[0]) == (JOB, sent[1])
    assert facing(pair, as_main, sent[1]) == (PID, sent[0])
    return sent


def test_both_ends_prove_themselves_and_the_secret_does_not_travel(pair, in_background, monkeypatch):
    pieces = []
    for _ in range(2):
        main, worker = handshake_of(pair, in_background, monkeypatch)
        assert TOKEN not in main + worker
        # Nonces and proofs differ for each connection and for each role.
        pieces += [main[8:40], main[40:72], worker[8:40], worker[-32:]]
    assert len(set(pieces)) == 8


@pytest.mark.parametrize(("token", "worker_id"), [(OTHER, WORKER), (TOKEN, WORKER + 1)])
def test_a_worker_with_another_secret_or_number_is_a_stranger(pair, in_background, token, worker_id):
    main, worker = pair()
    other = in_background(as_worker, worker, token)
    assert as_main(main, TOKEN, worker_id) is None
    main.close()
    assert isinstance(other.result(SECONDS), ConnectionResetError)


def test_a_main_process_without_the_secret_is_refused_and_its_job_is_not_read(in_background, tmp_path):
    trace = tmp_path / "unpickled"

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(trace),)

    job = bytes(4) + pickle.dumps(Bomb())

    def pretend(listener, proof):
        connection, _ = listener.accept()
        with connection:
            challenge = handshake._MAGIC + bytes(32)
            handshake._send(connection, challenge, deadline())
            hello = connection.recv(4096)
            handshake._send(connection, proof(challenge, hello[:-32], hello[-32:]), deadline())
            handshake.send_reply(connection, True, job, deadline())

    for proof in (
        lambda challenge, hello, shown: handshake._proof(OTHER, b"main", challenge + hello),
        lambda challenge, hello, shown: shown,
        lambda challenge, hello, shown: os.urandom(32),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            other = in_background(pretend, listener, proof)
            call = Call("127.0.0.1", listener.getsockname()[1], TOKEN, WORKER, 0)
            with pytest.raises(handshake.HandshakeError, match="does not know the secret"):
                remote.serve(lambda: job, call, SECONDS)
            other.exception(SECONDS)  # a reset, if the worker was quicker
    assert not trace.exists()
    # The job would have left its trace.
    pickle.loads(job[4:])
    assert trace.exists()


def test_a_recorded_handshake_cannot_be_replayed(pair, in_background, monkeypatch):
    main, worker = handshake_of(pair, in_background, monkeypatch)
    refused, sent = facing(pair, as_main, worker)
    assert refused is None and len(sent) == handshake._CHALLENGE_BYTES
    assert "does not know the secret" in str(facing(pair, as_worker, main)[0])


def test_each_byte_counts(pair, transcript):
    """A proof covers all that was sent before it, and a connection that is cut at any byte is refused."""
    main, worker = transcript
    for at in range(len(worker)):
        refused, sent = facing(pair, as_main, changed(worker, at))
        assert refused is None and len(sent) == handshake._CHALLENGE_BYTES, at
        assert facing(pair, as_main, worker[:at])[0] is None, at
    for at in range(len(main)):
        assert isinstance(facing(pair, as_worker, main[:at])[0], ConnectionResetError), at
    for at in range(handshake._CHALLENGE_BYTES + 32):
        assert isinstance(facing(pair, as_worker, changed(main, at))[0], handshake.HandshakeError), at


def changed(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_lengths_are_checked_before_anything_is_received_for_them(pair):
    main, stranger = pair()
    length = handshake._VERSIONS_MAX + 1
    # The stranger keeps the connection open, and sends all that an end would receive if it did not check the length.
    stranger.sendall(handshake._HELLO.pack(b"rustload", bytes(32), WORKER, PID, length) + bytes(length))
    assert as_main(main) is None
    assert len(main.recv(1 << 16)) == length
    worker, other = pair()
    other.sendall(handshake._REPLY.pack(True, handshake._REPLY_MAX + 1))
    with pytest.raises(handshake.HandshakeError, match="announces a reply of 1073741825 bytes"):
        handshake.receive_reply(worker, deadline())


def test_a_job_that_is_too_long_is_refused_before_it_is_sent(pair, monkeypatch):
    main, worker = pair()
    monkeypatch.setattr(handshake, "_REPLY_MAX", 10)
    with pytest.raises(handshake.HandshakeError, match=r"11 bytes, and at most 10 .* state_dict\(\)"):
        handshake.send_reply(main, True, bytes(11), deadline())
    handshake.send_reply(main, True, bytes(10), deadline())
    assert handshake.receive_reply(worker, deadline()) == bytes(10)


def trickle(connection, data, seconds):
    for at in range(len(data)):
        time.sleep(seconds)
        try:
            connection.send(data[at : at + 1])
        except OSError:
            break  # the other end has given up


def test_a_slow_peer_is_waited_for(pair, in_background, transcript):
    main, worker = transcript
    for end, sent, expected in ((as_main, worker, PID), (as_worker, main, JOB)):
        mine, other = pair()
        sender = in_background(trickle, other, sent, 0.001)
        assert end(mine) == expected
        sender.result(SECONDS)


def test_a_peer_that_is_too_slow_or_silent_is_refused_in_time(pair, in_background, transcript, monkeypatch):
    monkeypatch.setattr(handshake, "_HELLO_SECONDS", 0.2)
    main, worker = transcript

    def hurried(connection):
        return as_worker(connection, seconds=0.2)

    for end, sent in ((as_main, worker), (hurried, main)):
        for data in (sent, b""):
            mine, other = pair()
            sender = in_background(trickle, other, data, 0.1)
            refused = end(mine)
            assert refused is None if end is as_main else isinstance(refused, TimeoutError)
            mine.close()
            sender.result(SECONDS)


def test_versions_are_compared_after_both_proofs(pair, in_background, monkeypatch):
    own = handshake.versions()
    reported = iter([{"rustloader": "9.9.9", "Python": "3.11"}, own])  # the worker's first
    monkeypatch.setattr(handshake, "versions", lambda: next(reported))
    main, worker = pair()
    other = in_background(as_worker, worker)
    with pytest.raises(handshake.HandshakeError, match=r"rustloader 9\.9\.9 there and") as caught:
        as_main(main)
    # The worker accepts the text, because the main process has proved itself.
    assert str(other.result(SECONDS)) == str(caught.value)


def test_a_stranger_is_not_told_which_versions_there_are(pair):
    text = json.dumps({"rustloader": "9.9.9"}).encode()
    hello = handshake._HELLO.pack(b"rustload", bytes(32), WORKER, PID, len(text)) + text + bytes(32)
    refused, sent = facing(pair, as_main, hello)
    assert refused is None and len(sent) == handshake._CHALLENGE_BYTES


def test_a_call_does_not_show_its_secret():
    assert repr(TOKEN) not in repr(Call("127.0.0.1", 1, TOKEN, WORKER, 0))
