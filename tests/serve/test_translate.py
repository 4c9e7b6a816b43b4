"""Promises of translation streams: the words of a stream by itself, whatever others send."""

import contextlib
import json
import random
import threading

import numpy as np
import pytest

from leap.models.fbank import LeapformerFeatureExtractor
from leap.tasks.simul.model import ModelConfig, build_model, save_model
from leap.tasks.simul.streaming.stream import load_trained
from leap.tasks.simul.vocabulary import EOS, train_vocabulary

torch = pytest.importorskip("torch")
client = pytest.importorskip("websockets.sync.client", reason="the extra serve is not installed")
closed = pytest.importorskip("websockets.exceptions")
app = pytest.importorskip("leap.serve.app", reason="the extra serve is not installed")
translate = pytest.importorskip("leap.serve.translate")

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
LINES = ["one hundred and nine", "seven", "three hundred forty-two seven twenty-one"]


@pytest.fixture(scope="module", params=["text", "speech"])
def source(request):
    return request.param


@pytest.fixture(scope="module")
def run(source, tmp_path_factory):
    """A run folder with a model that knows nothing, but ends now and then."""
    vocabulary = train_vocabulary([*LINES, "einhundertneun", "sieben"], size=60)
    torch.manual_seed(1)
    extractor = None
    if source == "speech":
        extractor = LeapformerFeatureExtractor(mean=[12.0] * 80, std=[3.0] * 80)
    sizes = ModelConfig(hidden_size=16, feed_forward_size=16, n_layer=1, encoder_layers=1, n_head=2)
    model = build_model(sizes, vocabulary, None if extractor is None else 80)
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 1.5
    folder = tmp_path_factory.mktemp(source)
    save_model(model, vocabulary, extractor, folder)
    return folder


@pytest.fixture
def serve(live):
    def make(run, seconds=60.0, **settings):
        made = translate.Translations(load_trained(run), "it", reset=None, **settings)
        return live(app.make_app(translations=made, access=app.Access(seconds=seconds)))

    return make


@contextlib.contextmanager
def stream(server, **options):
    """A connection that sends and receives JSON."""
    url = server.url.replace("http", "ws") + "/v1/translations"
    with client.connect(url, **options) as socket:
        yield socket


def say(socket, kind, **rest):
    socket.send(json.dumps({"type": kind, **rest}))


def told(socket):
    return json.loads(socket.recv(timeout=60))


def heard(socket):
    """Words up to the end of the source."""
    words = []
    while (message := told(socket))["type"] != "end":
        assert message["type"] == "words", message
        words += message["words"]
    assert message["words"] == len(words)
    return words


def pcm(seed):
    times = np.arange(16000 + 3000 * seed) / 16000
    wave = np.sin(2 * np.pi * (200 + 90 * seed + 300 * times) * times) / 2
    return (32767 * wave).astype("<i2")


def alone(run, policy="wait-3"):
    """The words of each source by itself."""
    trained = load_trained(run)
    found = []
    for i, line in enumerate(LINES):
        one = trained.interpreter(policy).stream()
        sound = pcm(i).astype(np.float32) / 32768
        found.append(one.push(line if trained.extractor is None else sound) + one.finish())
    return found


def send(socket, source, i, chance):
    """A source in pieces of any size, odd numbers of bytes too."""
    content = LINES[i] if source == "text" else pcm(i).tobytes()
    while content:
        n = chance.randint(1, 9) if source == "text" else chance.randint(1, 9001)
        if source == "text":
            say(socket, "text", text=content[:n])
        else:
            socket.send(content[:n])
        content = content[n:]
    say(socket, "end")


def test_streams_side_by_side_have_the_words_they_have_alone(serve, run, source):
    server, expected = serve(run), alone(run)
    assert any(expected)
    found = {}

    def use(seed):
        chance = random.Random(seed)
        with stream(server) as socket:
            for i in chance.sample(range(len(LINES)), len(LINES)):
                send(socket, source, i, chance)
                found[seed, i] = heard(socket)

    users = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join(120)
    assert found == {(seed, i): expected[i] for seed in range(4) for i in range(len(LINES))}


def test_a_client_chooses_its_policy_and_rate(serve, run, source):
    server, expected = serve(run), alone(run, "offline")
    with stream(server) as socket:
        say(socket, "start", policy="offline")
        rate = 16000 if source == "speech" else None
        assert told(socket) == {
            "type": "ready", "source": source, "policy": "offline", "sample_rate": rate,
        }  # fmt: skip
        send(socket, source, 2, random.Random(0))
        assert heard(socket) == expected[2]
        if source == "speech":
            say(socket, "start", sample_rate=8000)
            assert told(socket)["sample_rate"] == 8000
            socket.send(pcm(2)[::2].tobytes())
            say(socket, "end")
            heard(socket)


BAD = [
    ("{", "the message is no JSON"),
    ("[]", "the message is no object of JSON"),
    ("[" * 100_000, "the message is no JSON"),
    ('{"type": "sing"}', "there is no message of type 'sing'; send start, text or end"),
    ('{"type": "start", "policy": 3}', "policy must be text"),
    ('{"type": "start", "policy": "hurry-3"}', "hurry-3"),
]
BAD_TEXT = [
    (b"\0\0", "this model translates text"),
    ('{"type": "text"}', "has its words in 'text'"),
    ('{"type": "start", "sample_rate": 16000}', "which has no sample_rate"),
    (json.dumps({"type": "text", "text": "x" * 2000}), "a word of 2,000 characters"),
]
BAD_SPEECH = [
    ('{"type": "text", "text": "a"}', "this model translates speech"),
    ('{"type": "start", "sample_rate": 0}', "sample_rate=0 must be from 4000 to 192000"),
    ('{"type": "start", "sample_rate": -8000}', "sample_rate=-8000 must be"),
    ('{"type": "start", "sample_rate": "16k"}', "sample_rate='16k' must be"),
]


def test_bad_input_is_one_sentence_and_the_stream_goes_on(serve, run, source):
    server, expected = serve(run), alone(run)
    with stream(server) as socket, stream(server) as other:
        for bad, message in BAD + (BAD_TEXT if source == "text" else BAD_SPEECH):
            socket.send(bad)
            answer = told(socket)
            assert answer["type"] == "error" and message in answer["message"], (bad, answer)
            assert "\n" not in answer["message"]
        for each in (socket, other):
            send(each, source, 1, random.Random(0))
            assert heard(each) == expected[1]


def test_streams_are_limited_and_one_that_vanishes_makes_room(serve, run):
    server = serve(run, max_streams=1)
    with stream(server), stream(server) as second:
        assert told(second) == {
            "type": "error", "message": "too many streams are open; try again later",
        }  # fmt: skip
        with pytest.raises(closed.ConnectionClosed):
            second.recv(timeout=60)
        assert second.close_code == 1013
    with stream(server) as third:
        say(third, "end")
        assert told(third) == {"type": "end", "words": 0}


def test_a_stream_that_says_nothing_is_closed(serve, run):
    with stream(serve(run, seconds=0.2)) as socket:
        assert "nothing came for 0.2 s" in told(socket)["message"]
        with pytest.raises(closed.ConnectionClosed):
            socket.recv(timeout=60)


def test_pages_of_other_sites_are_refused(serve, run):
    server = serve(run)
    with pytest.raises(closed.InvalidStatus), stream(server, origin="http://evil.example"):
        pass


def test_there_are_no_completions_of_a_translation_model(serve, run):
    httpx = pytest.importorskip("httpx", reason="the extra dev is not installed")
    server = serve(run)
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "it"
    assert httpx.post(f"{server.url}/v1/completions", json={}).status_code == 404
    assert httpx.get(f"{server.url}/healthz").status_code == 200
