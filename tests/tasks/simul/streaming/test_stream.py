"""Streams: the words of batch decoding under the same schedule, however the source is cut."""

import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from leap.errors import ConfigError, FileError, InputError
from leap.models.fbank import LeapformerFeatureExtractor
from leap.runtime.streaming import stream as streaming
from leap.runtime.streaming.pauses import QUIET, are_quiet
from leap.runtime.streaming.policies import AlignAtt, LocalAgreement, TailMass, read_policy
from leap.runtime.streaming.sources import SILENCE, TextSource
from leap.runtime.streaming.stream import StreamPool
from leap.runtime.streaming.vocabulary import BOS, EOS, PAD, UNK
from leap.tasks.simul.model import ModelConfig, build_model
from leap.tasks.simul.streaming.stream import Interpreter

SMALL = {"hidden_size": 16, "feed_forward_size": 16, "n_layer": 1, "encoder_layers": 1, "n_head": 2}
DEEP = SMALL | {"n_layer": 2, "encoder_layers": 2}
TEXT = "one hundred seven five"
N_BINS = 8
FEW = 4
SCHEDULED = ["wait-1", "wait-3", "wait-2/2", "offline"]
pytestmark = pytest.mark.usefixtures("shapes_unchecked")  # Thousands of small steps.
AGREE, ALIGN, TAIL = LocalAgreement(2), AlignAtt(2, longest=4), TailMass(0.5)
ADAPTIVE = [AGREE, ALIGN, TAIL]


def name(policy):
    return policy if isinstance(policy, str) else policy.name


@pytest.fixture(autouse=True)
def short_drafts(monkeypatch):
    """Long enough for hypotheses to differ and to agree."""
    monkeypatch.setattr(streaming, "DRAFT", 5)
    monkeypatch.setattr(streaming, "FEW", FEW)


def make(
    vocabulary,
    policy="wait-3",
    *,
    speech=False,
    seed=0,
    attention="leapformer",
    window=None,
    sizes=SMALL,
    **options,
):
    """An interpreter whose random model has opinions, in double precision."""
    options = {"longest": 1.0} | options  # Short, and never in the way of a schedule.
    torch.manual_seed(seed)
    config = ModelConfig(
        **sizes,
        attention=attention,
        cross_attention=None if window is None else "softmax",
        cross_window=window,
        dropout=0.0,
        subsampling=2,
        ctc_weight=0.0,
    )
    model = build_model(config, vocabulary, N_BINS if speech else None).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
        # The end is likely enough to come up, and not so likely that nothing else does.
        model.lm_head.weight[EOS] *= 1.3
    if speech:
        mean, std = np.full(N_BINS, 12.0), np.full(N_BINS, 3.0)
        options["extractor"] = LeapformerFeatureExtractor(feature_size=N_BINS, mean=mean, std=std)
    policy = read_policy(policy) if isinstance(policy, str) else policy
    return Interpreter(model, vocabulary, policy, **options)


def make_sound(seconds, seed=0):
    """Notes of various heights, which no two models would translate alike."""
    random = np.random.default_rng(seed)
    notes = [
        np.sin(np.arange(1600) * random.uniform(0.05, 1.5)) * random.uniform(0.05, 0.9)
        for _ in range(round(seconds * 10))
    ]
    return np.concatenate([np.zeros(0), *notes]).astype(np.float32)


@torch.no_grad()
def batch_greedy(interpreter, source):
    """Greedy decoding with one forward pass over everything for each piece, under the schedule."""
    model, chunk = interpreter.model, interpreter.chunk_size
    if interpreter.extractor is None:
        pieces = interpreter.vocabulary.encode(source)
        inputs = {"input_ids": torch.tensor([[*pieces, EOS]])}
        n_states = len(pieces) + 1
    else:
        features = interpreter.extractor(source, return_tensors="pt")["input_features"]
        inputs = {"input_features": features.double()}
        n_states = -(-features.shape[1] // model.config.frames_per_state)
    limit = int(interpreter.longest * n_states) + FEW
    schedule = interpreter.policy.schedule(limit + 1, chunk)
    goal = [n_states] * (limit + 1) if schedule is None else schedule.tolist()
    written, visible = [BOS], []
    while len(written) <= limit:
        now = min(max(goal[len(visible)], *visible, 0, 0), n_states)
        while True:
            logits = model(
                **inputs,
                decoder_input_ids=torch.tensor([written]),
                visible=torch.tensor([*visible, now]),
                chunk_size=chunk,
            ).logits[0, -1]
            logits[[BOS, PAD, UNK]] = -torch.inf
            if now == n_states and not interpreter.vocabulary.decode(written[1:]):
                logits[EOS] = -torch.inf
                if written[-1] == interpreter.space:
                    logits[interpreter.space] = -torch.inf
            piece = int(logits.argmax())
            if piece != EOS or now == n_states:
                break
            now = min(now + chunk, n_states)
        if piece == EOS:
            break
        written.append(piece)
        visible.append(now)
    return interpreter.vocabulary.decode(written[1:])


def run(stream, parts):
    words = [word for part in parts for word in stream.push(part)]
    return " ".join(words + stream.finish())


@pytest.mark.parametrize(("chunk", "seed"), [(1, 0), (3, 1)])
@pytest.mark.parametrize("policy", SCHEDULED)
def test_text_is_translated_as_all_at_once(vocabulary, policy, chunk, seed):
    interpreter = make(vocabulary, policy, seed=seed, chunk_size=chunk)
    stream = interpreter.stream()
    expected = batch_greedy(interpreter, TEXT)
    assert run(stream, [[word] for word in TEXT.split()]) == expected
    assert run(stream, ["seven"]) == batch_greedy(interpreter, "seven")  # Nothing has leaked.
    assert run(stream, [TEXT[i : i + 4] for i in range(0, len(TEXT), 4)]) == expected
    assert run(stream, [TEXT]) == expected


@pytest.mark.parametrize("attention", ["leapformer", "softmax", "elu-linear", "leap"])
def test_so_it_is_with_other_attentions_and_more_layers(vocabulary, attention):
    if attention == "leap":
        parts = ModelConfig(**DEEP, decoder_attention="leap", dropout=0.0)
        model = build_model(parts, vocabulary).double()
        interpreter = Interpreter(model, vocabulary, read_policy("wait-2"), longest=1.0)
    else:
        interpreter = make(vocabulary, "wait-2", attention=attention, sizes=DEEP)
    expected = batch_greedy(interpreter, TEXT)
    assert expected
    assert run(interpreter.stream(), [f"{word} " for word in TEXT.split()]) == expected


@pytest.mark.parametrize(("chunk", "seed"), [(4, 1), (5, 2), (0, 3)])
@pytest.mark.parametrize("policy", ["wait-1/4", "wait-3/4", "offline"])
def test_speech_is_translated_as_all_at_once(vocabulary, policy, chunk, seed):
    interpreter = make(vocabulary, policy, speech=True, seed=seed, chunk_size=chunk)
    stream = interpreter.stream()
    for sound in (make_sound(0.5, seed), make_sound(0.32, seed + 9), make_sound(0.1, seed)):
        expected = batch_greedy(interpreter, sound)
        assert expected
        for size in (5120, 777) if len(sound) == 8000 else (5120,):
            parts = [sound[i : i + size] for i in range(0, len(sound), size)]
            assert run(stream, parts) == expected


def test_a_beam_leaves_what_was_written_before_the_end(vocabulary):
    n_other = 0
    for seed in range(4):
        greedy, searched = (make(vocabulary, "wait-2", seed=seed, beam=n).stream() for n in (1, 4))
        assert searched.push(TEXT + " ") == greedy.push(TEXT + " ")
        before = vocabulary.decode(greedy._row.words.held)
        assert before and before == vocabulary.decode(searched._row.words.held)
        ends = [" ".join(stream.finish()) for stream in (greedy, searched)]
        assert all(end.startswith(before) and end > before for end in ends)
        n_other += ends[0] != ends[1]
    assert n_other
    with pytest.raises(ConfigError, match="beam=0 must be 1 or more"):
        make(vocabulary, beam=0)


@pytest.mark.parametrize("speech", [False, True], ids=["text", "speech"])
@pytest.mark.parametrize("policy", ["wait-2", "offline", "beam", *ADAPTIVE], ids=name)
def test_a_pool_gives_each_stream_what_it_has_alone(vocabulary, policy, speech):
    policy, beam = ("wait-2", 3) if policy == "beam" else (policy, 1)
    interpreter = make(vocabulary, policy, speech=speech, seed=1, beam=beam)
    if speech:
        whole = [make_sound(s, i) for i, s in enumerate((0.5, 0.2, 0.0, 0.7))]
        parts = [[sound[i : i + 3000] for i in range(0, len(sound), 3000)] for sound in whole]
    else:
        parts = [[[word] for word in TEXT.split()[:n]] for n in (4, 1, 0, 2)]
    alone = [run(interpreter.stream(), each) for each in parts]
    pool = interpreter.pool(len(parts))
    words = [[] for _ in parts]
    for step in range(max(map(len, parts)) + 1):
        pushed = pool.push([each[step] if step < len(each) else None for each in parts])
        ending = [i for i, each in enumerate(parts) if step == len(each)]
        for found in (pushed, pool.finish(ending)):
            for said, new in zip(words, found, strict=True):
                said += new
    assert [" ".join(said) for said in words] == alone
    assert alone[0] and alone[2] == ""


@pytest.fixture
def often_switched():
    """Threads take turns thousands of times per second, so that what they share shows."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.parametrize("policy", ["wait-2", *ADAPTIVE], ids=name)
@pytest.mark.parametrize("window", [None, 5], ids=["leapformer", "softmax-window"])
def test_streams_in_threads_have_what_each_has_alone(vocabulary, policy, window, often_switched):
    interpreter = make(vocabulary, policy, window=window)
    sources = [TEXT, "seven nine five", "one five hundred seven", "five thousand one"]

    def translate(_):
        return [run(interpreter.stream(), list(source)) for source in sources]

    alone = translate(0)
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(translate, range(3))) == [alone] * 3


def test_what_a_policy_does_not_trust_is_not_written(vocabulary):
    wary, bold = (make(vocabulary, TailMass(share)).stream() for share in (1e-9, 1.0))
    for stream in (wary, bold):
        stream.push(TEXT + " ")
    assert wary._row.n_written == 0 < bold._row.n_written
    assert wary.finish()


@pytest.mark.parametrize("policy", [*SCHEDULED, *ADAPTIVE], ids=name)
def test_with_a_window_streams_are_the_same_alone_and_in_a_pool(vocabulary, policy):
    interpreter = make(vocabulary, policy, window=3)
    sources = [TEXT, "seven nine", "one five hundred seven"]
    alone = [run(interpreter.stream(), [source]) for source in sources]
    if name(policy) in SCHEDULED:
        assert alone == [batch_greedy(interpreter, source) for source in sources]
    pool = interpreter.pool(3)
    for _ in range(2):  # In another order again: nothing is left in a row.
        sources, alone = sources[1:] + sources[:1], alone[1:] + alone[:1]
        words = [[], [], []]
        for i in range(max(map(len, sources))):
            for said, new in zip(
                words, pool.push([each[i : i + 1] for each in sources]), strict=True
            ):
                said += new
        for said, new in zip(words, pool.finish(), strict=True):
            said += new
        assert [" ".join(said) for said in words] == alone


@pytest.mark.parametrize("policy", [ALIGN, TAIL], ids=name)
def test_a_window_that_is_all_too_new_is_refused(vocabulary, policy):
    with pytest.raises(ConfigError, match=r"the last 2 source states, .* than cross_window=2; it"):
        make(vocabulary, policy, window=2)
    stream = make(vocabulary, policy, window=3).stream()
    stream.push(TEXT + " ")
    assert stream._row.n_read > 3


@pytest.mark.parametrize("beam", [1, 3])
def test_streams_that_end_are_stepped_beside_those_that_go_on(vocabulary, beam):
    interpreter = make(vocabulary, "wait-2", sizes=DEEP, beam=beam)
    sources = [TEXT, "seven five one seven nine"]
    expected = [run(interpreter.stream(), [source]) for source in sources]
    pool = interpreter.pool(2)
    pool.push(["seven", None])
    pool.rows[0].source.finish()  # With the other's next words, as one step.
    ended, going_on = pool.push([None, sources[1]])
    assert " ".join(ended) == run(interpreter.stream(), ["seven"])
    words = [pool.push([sources[0], None])[0], going_on]
    for said, new in zip(words, pool.finish(), strict=True):
        said += new
    assert [" ".join(said) for said in words] == expected


def test_a_pool_whose_streams_end_by_turns_does_not_grow(vocabulary):
    pool = make(vocabulary, "wait-2", attention="softmax").pool(2)
    sizes = []
    for _ in range(4):
        pool.push(["one seven ", "five "])
        pool.finish([0])
        pool.push(["nine ", "seven "])
        pool.finish([1])
        pool.finish([0])
        sizes.append(pool.states.n_bytes)
    assert len(set(sizes)) == 1


@pytest.mark.parametrize("window", [None, 3])
def test_streams_can_join_a_pool_and_leave_it(vocabulary, window):
    interpreter = make(vocabulary, "wait-2", attention="softmax", window=window)
    first, second = TEXT.split(), ["seven", "nine", "one", "five"]
    expected = [run(interpreter.stream(), [[w] for w in each]) for each in (first, second)]
    streams = [interpreter.stream(), interpreter.stream()]
    words = [streams[0].push(first[:3]), streams[1].push(second[:1])]
    pool = StreamPool.join(streams)
    for said, new in zip(words, pool.push([first[3:], second[1:3]]), strict=True):
        said += new
    streams = pool.split()
    words[1] += streams[1].push(second[3:])
    for said, stream in zip(words, streams, strict=True):
        said += stream.finish()
    assert [" ".join(said) for said in words] == expected


@pytest.mark.parametrize("speech", [False, True], ids=["text", "speech"])
@pytest.mark.parametrize("policy", ["wait-3", AGREE, ALIGN], ids=name)
@pytest.mark.parametrize("window", [None, 9])
def test_a_stream_can_be_forked_and_saved_in_the_middle(
    vocabulary, policy, speech, window, tmp_path
):
    interpreter = make(vocabulary, policy, speech=speech, window=window)
    source = make_sound(0.6) if speech else TEXT
    expected = run(interpreter.stream(), [source])
    for cut in (len(source) // 2, len(source) // 3):  # In the middle of a word.
        stream = interpreter.stream()
        words = stream.push(source[:cut])
        stream.save(tmp_path / "stream.safetensors")
        fork, twin = stream.fork(), stream.fork()
        fork.push(source[: cut // 2])  # Another way: no harm to the stream.
        fork.finish()
        loaded = interpreter.load(tmp_path / "stream.safetensors")
        for each in (stream, twin, loaded):
            assert " ".join([*words, *each.push(source[cut:]), *each.finish()]) == expected
    other = make(vocabulary, policy, speech=not speech)
    with pytest.raises(FileError, match="no stream of this"):
        other.load(tmp_path / "stream.safetensors")


def test_a_stream_does_not_grow(vocabulary):
    stream = make(vocabulary, "wait-3/8", chunk_size=8).stream()
    sizes = []
    for i in range(8):
        stream.push(["seven"] * 20)
        if i % 2:
            sizes.append(stream._pool.states.n_bytes)
            assert stream.n_bytes < sizes[0] + 1000
    assert len(set(sizes)) == 1


def test_nothing_in_means_nothing_out(vocabulary):
    stream = make(vocabulary).stream()
    assert stream.finish() == stream.push("") + stream.push("  \n") + stream.finish() == []
    stream = make(vocabulary, "wait-1/4", speech=True).stream()
    assert stream.push(np.zeros(0, np.float32)) == [] == stream.finish()
    assert stream.push(np.zeros(48000, np.float32)) == [] == stream.finish()
    assert stream.push(make_sound(0.5)) + stream.finish()


@pytest.mark.parametrize("policy", ["wait-2/4", "offline"], ids=name)
def test_silence_before_the_first_sound_is_not_waited_for(vocabulary, policy):
    sound, silence = make_sound(1.28), np.zeros(5 * 16000, np.float32)
    alone, after = (make(vocabulary, policy, speech=True).stream() for _ in range(2))
    assert after.push(silence[: 16000 * 96 // 100]) == [] and after._row.n_read == 0
    for start in range(0, len(sound), 5120):
        part = sound[start : start + 5120]
        assert after.push(part) == alone.push(part)
        assert after._row.n_written == alone._row.n_written
    assert after.finish() == alone.finish()


def test_an_error_in_one_source_leaves_the_others_as_they_were(vocabulary):
    interpreter = make(vocabulary, "wait-1/4", speech=True)
    sound, broken = make_sound(0.64), np.full(5120, np.nan, np.float32)
    pool = interpreter.pool(2)
    with pytest.raises(InputError):
        pool.push([sound, broken])
    assert pool.push([sound, sound]) == interpreter.pool(2).push([sound, sound])


def test_a_list_of_words_completes_the_one_that_was_begun(vocabulary):
    expected = run(make(vocabulary).stream(), ["one seven"])
    assert run(make(vocabulary).stream(), ["one", ["seven"]]) == expected


@pytest.mark.parametrize("policy", ["wait-1", *ADAPTIVE], ids=name)
def test_a_model_that_always_ends_does_not_end_before_the_source(vocabulary, policy):
    interpreter = make(vocabulary, policy)
    write = interpreter.model.write_with_shares

    def ending(tokens, states, earlier):
        logits, *after = write(tokens, states, earlier)
        logits[..., EOS] = 1e3
        return logits, *after

    interpreter.model.write_with_shares = ending
    stream = interpreter.stream()
    assert stream.push([*TEXT.split()]) == []
    assert len(stream.finish()) == 1  # A source that says something has a translation.


@pytest.mark.parametrize("wanted", [EOS, "▁"])
def test_a_lone_space_is_no_translation(vocabulary, wanted):
    interpreter = make(vocabulary, "wait-1")
    write, space = interpreter.model.write_with_shares, vocabulary.pieces.index("▁")

    def spacing(tokens, states, earlier):
        logits, *after = write(tokens, states, earlier)
        logits[..., space if wanted == "▁" else wanted] = 1e2
        logits[tokens == BOS, space] = 1e3
        return logits, *after

    interpreter.model.write_with_shares = spacing
    assert len(run(interpreter.stream(), [TEXT])) > 0


@pytest.mark.parametrize("policy", ["wait-1", "offline", *ADAPTIVE], ids=name)
def test_a_model_that_never_ends_is_stopped(vocabulary, policy):
    interpreter = make(vocabulary, policy, longest=1.5)
    write, n_written = interpreter.model.write_with_shares, []
    begins = next(i for i, piece in enumerate(vocabulary.pieces) if i > 3 and piece[0] == "▁")

    def endless(tokens, states, earlier):
        n_written.append(tokens)
        logits, *after = write(tokens, states, earlier)
        logits[..., begins] = 1e3
        return logits, *after

    interpreter.model.write_with_shares = endless
    words = run(interpreter.stream(), [TEXT]).split()
    n_states = len(vocabulary.encode(TEXT)) + 1
    assert len(words) == int(1.5 * n_states) + FEW or vocabulary.pieces[begins] == "▁"
    assert len(n_written) < 40 * n_states


def test_a_reset_makes_each_sentence_a_source_of_its_own(vocabulary):
    sentences = ["one hundred and nine.", '"seven , sixty-eight."', "twenty-one !"]
    alone = make(vocabulary, "wait-2")
    expected = " ".join(run(alone.stream(), [each]) for each in sentences)
    stream = make(vocabulary, "wait-2", reset=100).stream()
    assert run(stream, [" ".join(sentences)]) == expected
    assert run(alone.stream(), [" ".join(sentences)]) != expected
    # Without an end it comes at the end of the word that fills the measure.
    source = TextSource(vocabulary, reset=5)
    source.push("seven " * 20)
    assert source.pieces.count(EOS) >= 2


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Dr. Smith came. | He left.", "en"),
        ("Made in the U.S. by hand. | They left the U.S. | They came.", "en"),
        ("Fruit, e.g. apples, is 3.14 kg. | Next one!", "en"),
        ("She met (Dr. Lee) and J. R. Hartley. | two dogs run", "en"),
        ('"Wait... what?" | "Go home." | Then', "en"),
        ("Es kam am 3. Oktober z.B. Dr. Haus. | Die Stadt.", "de"),
    ],
)
def test_sentences_end_where_they_do_and_not_at_every_full_stop(vocabulary, text, language):
    expected = [each.split() for each in text.split("|")]

    def sentences(parts):
        source, found = TextSource(vocabulary, reset=1000, language=language), []
        source.vocabulary = SimpleNamespace(encode=lambda word: [word])
        for part in parts:
            source = source.fork()
            source.push(part)
        source.finish()
        while (pieces := list(source.pieces)) != []:
            end = pieces.index(EOS)
            found.append(pieces[:end])
            source.pieces = deque(pieces[end + 1 :])
        return found

    whole = text.replace(" | ", " ")
    assert sentences([whole]) == expected
    assert sentences([whole[i : i + 3] for i in range(0, len(whole), 3)]) == expected


def test_the_end_of_a_sentence_waits_for_no_word_where_none_can_change_it(vocabulary):
    source = TextSource(vocabulary, reset=1000)
    source.push("a hat. ")
    assert source.pieces[-1] == EOS
    source.push("in the U.S. ")
    assert source.pieces[-1] != EOS
    kept = source.kept()
    restored = TextSource(vocabulary, reset=1000)
    restored.restore(kept)
    for each in (source, restored):
        before = len(each.pieces)
        each.push("They ")
        assert each.pieces[before] == EOS


@pytest.mark.parametrize(
    "parts",
    [["seven" * 4000], [["seven" * 4000]], ["seven" * 100] * 40],
    ids=["text", "list", "parts"],
)
def test_a_word_without_end_is_an_error_that_leaves_the_streams_as_they_were(vocabulary, parts):
    interpreter = make(vocabulary, "wait-2")
    pool = interpreter.pool(2)
    pool.push(["five ", None])
    with pytest.raises(InputError, match=r"a word of [\d,]+ characters or more, seven.*1,000 char"):
        for part in parts:
            pool.push(["five ", part])
    n_taken = 1 + len(pool.rows[1].source.begun) // 500
    assert n_taken <= 3
    words = pool.push(["one ", None])[0] + pool.finish([0])[0]
    alone = interpreter.stream()
    expected = [alone.push("five " * n_taken), alone.push("one "), alone.finish()]
    assert words == expected[1] + expected[2]


def with_pause(milliseconds, first=0.6):
    """Sound, a pause, and sound again."""
    pause = np.zeros(16 * milliseconds, np.float32)
    return np.concatenate([make_sound(first), pause, make_sound(0.5, seed=3)])


@pytest.mark.parametrize(("quiet", "n_sentences"), [(29, 1), (30, 2)], ids=["290-ms", "300-ms"])
@pytest.mark.parametrize("first", [40, 47])
def test_300_milliseconds_of_quiet_are_a_pause(vocabulary, first, quiet, n_sentences):
    source = make(vocabulary, speech=True, reset=100).row().source
    loudness = np.repeat([1.0, -1.0, 1.0], [first, quiet, 40]).astype(np.float32)
    source.frames = np.repeat(loudness[:, None], N_BINS, axis=1)
    source.quiet = are_quiet(source.frames)
    source.finish()
    n_read, n_ends = 0, 0
    while (chunk := source.take(n_read)) is not None:
        n_read = 0 if chunk.is_last else n_read + chunk.n_states
        n_ends += chunk.is_last
    assert n_ends == n_sentences


@pytest.mark.parametrize("first", [0.2, 0.6, 0.7], ids="{0}-s".format)
def test_a_pause_ends_a_sentence_of_speech_wherever_it_falls(vocabulary, first):
    interpreter = make(vocabulary, speech=True, reset=100)

    def lengths(sound):
        """Frames of each sentence."""
        source, found = interpreter.row().source, [0]
        source.push(sound)
        source.finish()
        n_read = 0
        while (chunk := source.take(n_read)) is not None:
            found[-1] += len(chunk.content)
            n_read += chunk.n_states
            if chunk.is_last:
                found.append(n_read := 0)
        return found[:-1]

    short, long = lengths(with_pause(200, first)), lengths(with_pause(500, first))
    assert len(short) == 1
    assert len(long) == 2
    assert long[0] == pytest.approx(100 * first, abs=3)  # Frames overlap where sound ends.
    assert long[1] == pytest.approx(50, abs=3)


def test_resets_of_speech_do_not_depend_on_how_it_is_cut(vocabulary):
    interpreter = make(vocabulary, "wait-1/4", speech=True, reset=100)
    sound = with_pause(500)
    whole = run(interpreter.stream(), [sound])
    assert run(interpreter.stream(), np.split(sound, range(370, len(sound), 370))) == whole
    assert run(make(vocabulary, "wait-1/4", speech=True).stream(), [sound]) != whole


def test_noise_and_clicks_in_a_pause_are_no_sentence(vocabulary):
    """What is quiet, if not silent, says nothing, nor is it waited for."""
    interpreter = make(vocabulary, "wait-1/4", speech=True, reset=100)
    noise = np.random.default_rng(0).normal(size=3 * 16000).astype(np.float32) * 5e-5
    chunk = interpreter.extractor.normalise(interpreter.extractor.frames(noise))
    assert chunk.max() < QUIET
    assert interpreter.extractor.energy(chunk).max() > SILENCE
    expected = run(interpreter.stream(), [np.concatenate([make_sound(0.6), noise[:1600]])])
    stream = interpreter.stream()
    words = stream.push(np.concatenate([make_sound(0.6), noise]))
    assert stream._row.n_read == 0
    noise[::16000] = 0.5
    assert " ".join(words + stream.push(noise) + stream.finish()) == expected


def test_speech_without_a_pause_is_reset_at_the_latest_after_so_many_states(vocabulary):
    endless = make(vocabulary, "wait-1/4", speech=True, reset=16).stream()
    endless.push(make_sound(1.5))
    assert endless._row.n_read < 16


@torch.no_grad()
def test_a_stream_in_a_pause_is_gone_on_with_after_saving_and_forking(vocabulary, tmp_path):
    interpreter = make(vocabulary, "wait-1/4", speech=True, reset=100)
    sound = with_pause(500)
    whole = run(interpreter.stream(), [sound])
    stream = interpreter.stream()
    cut = int(16000 * 0.8)  # Where the pause is not yet long enough.
    words = stream.push(sound[:cut])
    stream.save(tmp_path / "stream.safetensors")
    for other in (stream.fork(), interpreter.load(tmp_path / "stream.safetensors")):
        assert " ".join(words + other.push(sound[cut:]) + other.finish()) == whole


def test_wrong_input_is_an_error_that_says_so(vocabulary):
    text, speech = make(vocabulary), make(vocabulary, speech=True)
    with pytest.raises(InputError, match="text"):
        text.stream().push(np.zeros(10, np.float32))
    with pytest.raises(InputError, match="sound"):
        speech.stream().push("seven")
    with pytest.raises(InputError, match="2 sources for 1"):
        text.pool(1).push(["a", "b"])
    with pytest.raises(ConfigError, match="chunk_size=-1"):
        make(vocabulary, chunk_size=-1)
    with pytest.raises(ConfigError, match="extractor"):
        Interpreter(speech.model, vocabulary, read_policy("offline"))
