"""Translation models: whole, under a schedule, and reading and writing in turn."""

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

from leap.errors import ConfigError, InputError
from leap.models import (
    LeapformerForSeq2SeqLM,
    LeapformerForSpeechSeq2Seq,
    LeapformerSeq2SeqConfig,
    LeapformerSpeechConfig,
    States,
)

KINDS = {
    "leapformer": {},
    "leapformer-rotary": {"position_embedding": "rotary"},
    "leapformer-alibi": {"position_embedding": "alibi"},
    "softmax-alibi": {"attention": "softmax", "position_embedding": "alibi"},
    "leap-alibi": {
        "encoder_attention": "leap",
        "decoder_attention": "leap",
        "position_embedding": "alibi",
    },
    "travelled": {"proportion": "travelled"},
    "travelled-all": {
        "proportion": "travelled",
        "position_embedding": "alibi",
        "gate": "head",
        "convolution": 4,
        "clocks": 2,
    },
    "linear": {"attention": "elu-linear"},
    "softmax": {"attention": "softmax"},
    "windowed": {
        "cross_attention": "softmax",
        "cross_window": 3,
        "position_embedding": "alibi",
        "feature": "exp",
    },
    "mixed": {
        "encoder_attention": ["softmax", "leapformer"],
        "decoder_attention": "leap",
        "cross_attention": "cosformer",
        "position_embedding": "none",
    },
}
BINS = 5


def make_model(kind="leapformer", *, speech=False, seed=0, **changes):
    """A tiny model in double precision, with weights large enough to have opinions."""
    options = {
        "vocab_size": 23,
        "hidden_size": 16,
        "n_layer": 2,
        "n_head": 2,
        "hidden_dropout_prob": 0.0,
        "n_positions": 64,
    }
    torch.manual_seed(seed)
    options |= KINDS[kind] | changes
    if speech:
        config = LeapformerSpeechConfig(**options, n_bins=BINS)
        model = LeapformerForSpeechSeq2Seq(config)
    else:
        model = LeapformerForSeq2SeqLM(LeapformerSeq2SeqConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2)
    return model.double().eval()


def make_source(n, *, speech=False, batch=2):
    if speech:
        return torch.randn(batch, n, BINS, dtype=torch.double)
    return torch.randint(4, 23, (batch, n))


def call(model, source, target, **options):
    name = model.main_input_name
    return model(**{name: source}, decoder_input_ids=target, **options).logits


def in_turn(model, source, target, visible, chunk):
    """Logits of the target, its tokens written one by one as soon as the schedule lets them be."""
    per_state = model.config.frames_per_state if source.ndim == 3 else 1
    pieces = source.split(chunk * per_state, dim=1) if chunk else (source,)
    states, logits, n_read = States({}), [], 0
    for i, piece in enumerate(pieces):
        states = model.read(piece, states)
        n_read += -(-piece.shape[1] // per_state)
        while len(logits) < target.shape[1]:
            if visible[len(logits)] > n_read and i + 1 < len(pieces):
                break
            token = target[:, len(logits)]
            new, states = model.write(token.unsqueeze(1), states)
            logits.append(new)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 0])
@torch.no_grad()
def test_reading_and_writing_in_turn_is_the_same_as_all_at_once(kind, chunk):
    model = make_model(kind)
    source, target = make_source(8), make_source(6)
    wanted = torch.arange(6) * 1 + 2
    ends = (-(-wanted // chunk) * chunk if chunk else torch.full((6,), 8)).clamp_max(8)
    whole = call(model, source, target, visible=ends, chunk_size=chunk)
    assert_close(in_turn(model, source, target, wanted, chunk), whole)


@pytest.mark.parametrize(
    "kind", ["leapformer", "leapformer-alibi", "travelled", "linear", "softmax", "windowed"]
)
@pytest.mark.parametrize("n_frames", [32, 29], ids="{0}-frames".format)
@torch.no_grad()
def test_speech_heard_in_chunks_is_the_same_as_all_at_once(kind, n_frames):
    model = make_model(kind, speech=True)
    source, target = make_source(n_frames, speech=True), make_source(5)
    wanted = torch.arange(5) + 2
    ends = (-(-wanted // 3) * 3).clamp_max(8)
    whole = call(model, source, target, visible=ends, chunk_size=3)
    assert_close(in_turn(model, source, target, wanted, 3), whole)


@torch.no_grad()
def test_with_alibi_states_look_back_only_and_forget():
    model, source = make_model("leapformer-alibi"), make_source(8)
    encoder = model.get_encoder()
    whole, in_chunks = (encoder(source, chunk_size=n).last_hidden_state for n in (0, 3))
    assert_close(whole, in_chunks)
    assert_close(encoder(source[:, :5]).last_hidden_state, whole[:, :5])
    for attention in [layer.block.attention for layer in encoder.layers]:
        attention.fade = (0.0, 0.0)
    assert_close(encoder(source).last_hidden_state[:, 0], whole[:, 0])
    assert (encoder(source).last_hidden_state - whole)[:, 1:].abs().amax() > 1e-3


@torch.no_grad()
def test_states_of_linear_attention_and_of_windows_do_not_grow():
    sizes = {}
    for kind in ("leapformer", "softmax", "windowed"):
        model = make_model(kind, speech=True)
        states, sizes[kind] = States({}), []
        for _ in range(5):
            states = model.read(make_source(8, speech=True), states)
            _, states = model.write(make_source(1), states)
            sizes[kind].append(states.n_bytes)
    assert len(set(sizes["leapformer"])) == 1
    assert len(set(sizes["windowed"][1:])) == 1  # two states, then the three of the window
    assert sizes["softmax"] == sorted(set(sizes["softmax"]))


@pytest.mark.parametrize("speech", [False, True], ids=["text", "speech"])
@torch.no_grad()
def test_the_encoder_sees_no_later_chunk(speech):
    model = make_model(speech=speech)
    per_state = 4 if speech else 1
    source = make_source(6 * per_state, speech=speech, batch=1)
    changed = source.clone()
    changed[:, 4 * per_state :] = make_source(2 * per_state, speech=speech, batch=1) + 1
    before, after = (
        model.get_encoder()(**{model.main_input_name: x}, chunk_size=2).last_hidden_state
        for x in (source, changed)
    )
    assert_close(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).any()
    whole = model.get_encoder()(**{model.main_input_name: changed}, chunk_size=0).last_hidden_state
    assert not torch.isclose(whole[:, :4], after[:, :4]).all()


@pytest.mark.parametrize("kind", ["leapformer", "softmax", "windowed", "mixed"])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_pads_of_the_source_change_nothing(kind, side):
    model = make_model(kind)
    source, target = make_source(7, batch=1), make_source(4, batch=1)
    visible = torch.tensor([2, 3, 6, 99])
    alone = call(model, source, target, visible=visible, chunk_size=2)
    pads = torch.full((1, 3), 1)
    parts = [pads, source] if side == "left" else [source, pads]
    other = make_source(10, batch=1)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, slice(3) if side == "left" else slice(7, None)] = 0
    padded = call(
        model,
        torch.cat([torch.cat(parts, dim=1), other]),
        target.expand(2, -1),
        visible=visible,
        chunk_size=2,
        attention_mask=mask,
    )
    assert_close(padded[:1], alone)


@torch.no_grad()
def test_pads_of_speech_change_nothing():
    model = make_model(speech=True)
    source, target = make_source(30, speech=True), make_source(4)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, 17:] = 0
    visible = torch.tensor([2, 3, 6, 99])
    both = call(model, source, target, visible=visible, chunk_size=2, attention_mask=mask)
    alone = call(model, source[:1, :17], target[:1], visible=visible, chunk_size=2)
    assert_close(both[:1], alone)
    with pytest.raises(InputError, match="pads must stand behind"):
        call(model, source, target, attention_mask=mask.flip(1))


def test_a_schedule_of_each_sentence_is_its_own():
    model = make_model()
    source, target = make_source(8), make_source(3)
    visible = torch.tensor([[1, 2, 3], [4, 5, 8]])
    together = call(model, source, target, visible=visible)
    for row in range(2):
        each = call(model, source[row : row + 1], target[row : row + 1], visible=visible[row])
        assert_close(together[row : row + 1], each)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_is_the_same_with_a_cache_as_without(kind):
    model = make_model(kind)
    source = make_source(7)
    mask = torch.ones_like(source)
    mask[0, 5:] = 0
    for options in ({}, {"num_beams": 3}):
        # Fresh models like to repeat themselves, and then it hardly matters what they remember.
        options |= {"max_new_tokens": 6, "attention_mask": mask, "no_repeat_ngram_size": 1}
        cached = model.generate(source, **options)
        assert cached.tolist() == model.generate(source, use_cache=False, **options).tolist()


@pytest.mark.filterwarnings("ignore:Passing `generation_config`")
@pytest.mark.parametrize("kind", KINDS)
def test_speculative_decoding_is_greedy_decoding(kind, shapes_unchecked):
    model, assistant = make_model(kind), make_model("linear", seed=3)
    source = make_source(7, batch=1)
    options = {"max_new_tokens": 30, "do_sample": False}
    greedy = model.generate(source, **options).tolist()
    for drafts in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        assert model.generate(source, **options, **drafts).tolist() == greedy


def test_embeddings_may_be_given_instead_of_tokens():
    model = make_model()
    source, target = make_source(7), make_source(5)
    embed = model.get_input_embeddings()
    expected = call(model, source, target)
    of_both = model(inputs_embeds=embed(source), decoder_inputs_embeds=embed(target)).logits
    assert_close(of_both, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_pads_before_what_was_written_change_nothing_one_token_at_a_time(kind):
    model = make_model(kind)
    source, target = make_source(7), make_source(5)
    mask = torch.ones_like(target)
    mask[0, :2] = 0
    whole = call(model, source, target, decoder_attention_mask=mask)
    past, steps = None, []
    for i in range(5):
        given = {"decoder_attention_mask": mask[:, : i + 1], "past_key_values": past}
        out = model(source, decoder_input_ids=target[:, i : i + 1], use_cache=True, **given)
        past = out.past_key_values
        steps.append(out.logits)
    assert_close(torch.cat(steps, dim=1)[mask.bool()], whole[mask.bool()])


def test_speech_can_be_generated_from():
    model = make_model(speech=True)
    source = make_source(22, speech=True)
    mask = torch.ones(2, 22, dtype=torch.long)
    mask[0, 13:] = 0
    options = {"max_new_tokens": 6, "attention_mask": mask, "num_beams": 2, "chunk_size": 2}
    both = model.generate(input_features=source, **options)
    assert both.tolist() == model.generate(source, use_cache=False, **options).tolist()
    options["attention_mask"] = None
    alone = model.generate(source[:1, :13], **options)
    assert both[0, : alone.shape[1]].tolist() == alone[0].tolist()


@pytest.mark.parametrize("speech", [False, True])
def test_a_source_that_has_been_encoded_can_be_generated_from(speech):
    model, source = make_model(speech=speech), make_source(22, speech=speech)
    mask = torch.ones(2, 22, dtype=torch.long)
    mask[0, 13:] = 0
    for given in ({}, {"attention_mask": mask}):
        options = {"max_new_tokens": 6, "no_repeat_ngram_size": 1}
        encoded = model.get_encoder()(source, **given)
        expected = model.generate(source, **options, **given).tolist()
        assert model.generate(encoder_outputs=encoded, **options, **given).tolist() == expected


def test_the_loss_is_that_of_the_labels_a_token_later():
    model = make_model(label_smoothing=0.1, loss_without_logits=False)
    source, labels = make_source(5), make_source(4)
    labels[0, 3] = -100
    output = model(input_ids=source, labels=labels)
    shifted = torch.cat([torch.zeros(2, 1, dtype=torch.long), labels[:, :3]], dim=1)
    logits = call(model, source, shifted)
    assert_close(output.logits, logits)
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert_close(output.loss, plain)
    model.train()
    smoothed = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1
    )
    assert_close(model(input_ids=source, labels=labels).loss, smoothed)


def test_all_parameters_learn_and_the_transcript_teaches_the_encoder():
    model = make_model(speech=True, ctc_weight=0.5)
    source, labels = make_source(40, speech=True), make_source(4)
    transcript = torch.tensor([[5, 6, 7], [8, 9, -100]])
    plain = model(input_features=source, labels=labels).loss
    both = model(input_features=source, labels=labels, transcript=transcript).loss
    both.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    hidden = model.get_encoder()(source).last_hidden_state
    expected = torch.nn.functional.ctc_loss(
        model.ctc_head(hidden).log_softmax(-1).transpose(0, 1),
        transcript.clamp_min(0),
        torch.tensor([10, 10]),
        torch.tensor([3, 2]),
        blank=1,
        reduction="sum",
    )
    assert_close(both - plain, 0.5 * expected / labels.numel())
    with pytest.raises(InputError, match="ctc_weight"):
        make_model(speech=True)(input_features=source, labels=labels, transcript=transcript)


def test_a_sentence_without_a_transcript_learns_nothing_from_it():
    model = make_model(speech=True, ctc_weight=0.5)
    source, labels = make_source(40, speech=True, batch=3), make_source(4, batch=3)
    plain = model(input_features=source, labels=labels).loss
    for nothing in (torch.full((3, 2), -100), torch.empty(3, 0, dtype=torch.long)):
        without = model(input_features=source, labels=labels, transcript=nothing).loss
        assert_close(without, plain)
    without.backward()
    assert not model.ctc_head.weight.grad.any()  # But it has one, which DDP waits for.

    transcript = torch.tensor([[-100, -100], [8, 9], [-100, -100]])
    both = model(input_features=source, labels=labels, transcript=transcript).loss
    alone = {"input_features": source[1:2], "labels": labels[1:2]}
    known = model(**alone, transcript=transcript[1:2]).loss - model(**alone).loss
    assert_close(both - plain, known / 3)


CTC_ROWS = {
    "labels": torch.tensor([[5, 6, 7], [8, -100, -100], [9, 10, -100], [11, 12, 13]]),
    "transcript": torch.tensor([[5, 6, 7], [-100, -100, -100], [8, 9, -100], [10, -100, -100]]),
}


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_batch_add_up_to_it_the_transcript_too(parts):
    model = make_model(speech=True, ctc_weight=0.5)
    batch = {"input_features": make_source(40, speech=True, batch=4)} | CTC_ROWS
    n_items = (batch["labels"] != -100).sum()

    def learn(places, **options):
        model.zero_grad()
        losses = []
        for place in places:
            part = {name: rows[place] for name, rows in batch.items()}
            losses.append(model(**part, **options).loss)
            losses[-1].backward()
        return sum(losses), [parameter.grad.clone() for parameter in model.parameters()]

    whole = learn([slice(None)])
    assert_close(learn(torch.arange(4).chunk(parts), num_items_in_batch=n_items), whole)
    assert_close(learn([slice(None)], num_items_in_batch=n_items), whole)


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_the_trainer_teaches_a_transcript_in_whole_or_in_parts_alike(assert_parts_teach_as_a_whole):
    source = make_source(40, speech=True, batch=4).float()
    rows = [
        {"input_features": frames, "labels": labels, "transcript": transcript}
        for frames, labels, transcript in zip(source, *CTC_ROWS.values(), strict=True)
    ]
    assert_parts_teach_as_a_whole(lambda: make_model(speech=True, ctc_weight=0.5).float(), rows)


@pytest.mark.parametrize("speech", [False, True], ids=["text", "speech"])
def test_a_saved_model_is_found_by_the_auto_classes(speech, tmp_path):
    model = make_model(speech=speech, ctc_weight=0.3, chunk_size=2)
    model.save_pretrained(tmp_path)
    auto = AutoModelForSpeechSeq2Seq if speech else AutoModelForSeq2SeqLM
    loaded = auto.from_pretrained(tmp_path, dtype=torch.double)
    assert type(loaded) is type(model)
    assert loaded.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    source, target = make_source(8, speech=speech), make_source(3)
    assert_close(call(loaded, source, target), call(model, source, target))
    assert loaded.lm_head.weight is loaded.get_decoder().embed_tokens.weight


def test_one_vocabulary_has_one_table_and_two_have_two():
    joint, own = make_model(), make_model(source_vocab_size=9)
    encoder, decoder = joint.get_encoder(), joint.get_decoder()
    assert encoder.embed_tokens.weight is decoder.embed_tokens.weight
    assert own.get_encoder().embed_tokens.weight.shape == (9, 16)
    apart = make_model(tie_word_embeddings=False)
    assert apart.num_parameters() == joint.num_parameters() + 2 * 23 * 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_attention": "leap"}, "encoder_attention='leap'.*in chunks; .*leapformer"),
        ({"encoder_attention": "linformer"}, "'linformer'.*bidirectional attention in chunks"),
        ({"cross_attention": "fastformer"}, "cross_attention='fastformer'.*cross"),
        ({"decoder_attention": "none"}, "decoder_attention='none'.*as causal attention"),
        ({"position_embedding": "learned"}, "a stream may not"),
        ({"chunk_size": -1}, "chunk_size=-1"),
        ({"cross_window": 8}, "cross_window=8 is for cross_attention='softmax'; leapformer keeps"),
        ({"cross_attention": "softmax", "cross_window": 0}, "cross_window=0 must be 1 or more"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ({"encoder_attention": ["softmax"]}, "1 entries for n_layer=2"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_model(**options)


def test_what_a_stream_cannot_do_is_an_error_that_says_so():
    model = make_model(encoder_attention="cosformer")
    states = model.read(make_source(3))
    with pytest.raises(InputError, match="needs whole sequences"):
        model.read(make_source(3), states)
    with pytest.raises(InputError, match="nothing to translate"):
        make_model().get_decoder()(make_source(3))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("speech", [False, True])
def test_gradient_checkpointing_changes_no_gradient(speech, reentrant, shapes_unchecked):
    model = make_model(speech=speech).train()
    source, labels = make_source(9, speech=speech), make_source(5)
    gradients = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(source, labels=labels, use_cache=False).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert_close(*gradients)


@pytest.mark.parametrize("tied", [False, True])
def test_the_vocabulary_of_a_speech_model_can_grow(tied):
    model = make_model(speech=True, tie_word_embeddings=tied)
    source, target = make_source(9, speech=True), make_source(5)
    before = call(model, source, target)
    model.resize_token_embeddings(30)
    after = call(model, source, target)
    assert after.shape[-1] == model.config.vocab_size == 30
    assert_close(after[..., :23], before)


def test_speech_comes_first_without_a_name():
    model, source, target = make_model(speech=True), make_source(9, speech=True), make_source(5)
    expected = model.model(input_features=source, decoder_input_ids=target)[0]
    assert_close(model.model(source, decoder_input_ids=target)[0], expected)
