"""Translation models for Hugging Face, of text and of speech, that can read and write in turn.

Offline they are used as any other:

    model(input_ids=..., labels=...).loss         model.generate(input_ids)

Under a read schedule, `visible` says how many source states each target token may see, all tokens
at once for training. The same numbers come out of reading and writing in turn:

    states = model.read(chunk, states)                one more chunk of the source
    logits, states = model.write(token, states)       one more token of the target

where states of linear attention are of constant size. They are values: to take a token back, go on
from the states before it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.utils import can_return_tuple

from leap.errors import ConfigError, InputError
from leap.models.body import LeapformerPreTrainedModel
from leap.models.decoder import Decoder, TranslationCache
from leap.models.encoder import Encoder, SpeechEncoder, TextEncoder
from leap.models.loss import IGNORED, head_cross_entropy
from leap.models.seq2seq_config import LeapformerSeq2SeqConfig, LeapformerSpeechConfig
from leap.models.states import States
from leap.ops.state import State, accumulator


class LeapformerSeq2SeqPreTrainedModel(LeapformerPreTrainedModel):
    """What translation models have in common: how they begin."""

    config: LeapformerSeq2SeqConfig
    _no_split_modules = ["Layer", "TranslationLayer"]  # noqa: RUF012
    _can_record_outputs = {}  # noqa: RUF012  # The encoder and the decoder record their own.

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Conv1d):
            init.kaiming_normal_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)


class LeapformerSeq2SeqModel(LeapformerSeq2SeqPreTrainedModel):
    """Encoder and decoder, without a head."""

    def __init__(self, config: LeapformerSeq2SeqConfig) -> None:
        super().__init__(config)
        self.encoder: Encoder = self.make_encoder()
        self.decoder = Decoder(config)
        if config.source_vocab_size is None and isinstance(self.encoder, TextEncoder):
            self._tied_weights_keys = {"encoder.embed_tokens.weight": "decoder.embed_tokens.weight"}
        self.post_init()

    def make_encoder(self) -> Encoder:
        """The encoder of what this model reads."""
        return TextEncoder(self.config)

    def get_input_embeddings(self) -> nn.Module:
        """The table of target tokens, and with one vocabulary of source tokens."""
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:  # type: ignore[override]
        """Exchange the table of target tokens."""
        self.decoder.embed_tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        input_features: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: TranslationCache | None = None,
        visible: Tensor | None = None,
        chunk_size: int | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """Hidden states of target tokens.

        Args:
            input_ids, input_features, inputs_embeds: the source: tokens `[b, n]`, frames of speech
                `[b, n, n_bins]`, or vectors `[b, n, hidden_size]`.
            attention_mask: 1 at real tokens or frames of the source and 0 at pads.
            decoder_input_ids, decoder_inputs_embeds: the target, `[b, t]`: what comes before each
                token to predict.
            decoder_attention_mask, decoder_position_ids: of the target.
            encoder_outputs: of a source that has been encoded already.
            past_key_values: what an earlier call returned.
            visible: how many real states of the source each target token sees, `[t]` or `[b, t]`,
                never fewer than the one before; more than there are means all, as is the default.
            chunk_size: states that the encoder reads at once, 0 for all; the config's by default.
            use_cache: return a cache to go on from.
            output_attentions: give the weights of all layers too, where all of both languages is
                given in this call and nothing is hidden by a schedule or by chunks.
        """
        has_read = past_key_values is not None and any(past_key_values.is_updated.values())
        if encoder_outputs is None and not has_read:
            source = {
                "input_ids": input_ids,
                "input_features": input_features,
                "inputs_embeds": inputs_embeds,
            }
            encoder_outputs = self.encoder(
                attention_mask=attention_mask,
                chunk_size=chunk_size,
                **{name: value for name, value in source.items() if value is not None},
                **kwargs,
            )
        hidden = None if encoder_outputs is None else encoder_outputs[0]
        outputs = self.decoder(
            input_ids=decoder_input_ids,
            inputs_embeds=decoder_inputs_embeds,
            encoder_hidden_states=hidden,
            encoder_mask=self.encoder.state_mask(attention_mask),
            visible=visible,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        of_encoder = encoder_outputs if isinstance(encoder_outputs, BaseModelOutput) else None
        return Seq2SeqModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=hidden,  # type: ignore[arg-type]
            encoder_hidden_states=None if of_encoder is None else of_encoder.hidden_states,
            encoder_attentions=None if of_encoder is None else of_encoder.attentions,
        )


class LeapformerSpeechModel(LeapformerSeq2SeqModel):
    """Encoder of speech and decoder, without a head."""

    config: LeapformerSpeechConfig
    main_input_name = "input_features"

    def make_encoder(self) -> Encoder:
        """The encoder of speech."""
        return SpeechEncoder(self.config)

    def forward(
        self,
        input_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """As `LeapformerSeq2SeqModel.forward`, of frames of speech `[b, n, n_bins]`."""
        return super().forward(
            input_features=input_features,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            **kwargs,
        )


class LeapformerForSeq2SeqLM(LeapformerSeq2SeqPreTrainedModel, GenerationMixin):
    """A model that translates text."""

    def __init__(self, config: LeapformerSeq2SeqConfig) -> None:
        super().__init__(config)
        self.model = self.make_model()
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        table = "model.decoder.embed_tokens.weight"
        self._tied_weights_keys = {"lm_head.weight": table}
        if config.source_vocab_size is None and isinstance(self.model.encoder, TextEncoder):
            self._tied_weights_keys["model.encoder.embed_tokens.weight"] = table
        self.ctc_head = None
        if config.ctc_weight:
            if config.pad_token_id is None:
                raise ConfigError("ctc_weight needs a pad_token_id, which serves as the blank")
            size = config.source_vocab_size or config.vocab_size
            self.ctc_head = nn.Linear(config.hidden_size, size)
        self.post_init()

    def make_model(self) -> LeapformerSeq2SeqModel:
        """The model without a head."""
        return LeapformerSeq2SeqModel(self.config)

    def get_encoder(self, modality: str | None = None) -> Encoder:
        """The encoder."""
        return self.model.encoder

    def get_decoder(self) -> Decoder:
        """The decoder."""
        return self.model.decoder

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        past_key_values: TranslationCache | None = None,
        labels: Tensor | None = None,
        transcript: Tensor | None = None,
        visible: Tensor | None = None,
        chunk_size: int | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Logits of the next target token, or the loss; see `LeapformerSeq2SeqModel.forward`.

        Args:
            labels: tokens to predict, `[b, t]`, -100 where there is none. Without
                decoder_input_ids they are also what the decoder reads, a token later. With them
                the loss is returned, and no logits unless `config.loss_without_logits` is off. In
                training it is that of smoothed labels.
            transcript: source tokens that the encoder's states should tell, `[b, l]`, -100 where
                there is none, for a model with `ctc_weight`. A sentence that has none at all is
                left out. Like that of the labels, the sum is divided by the number of labels.
            logits_to_keep: for how many of the last tokens, or for which, to give logits.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            decoder_position_ids=decoder_position_ids,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            visible=visible,
            chunk_size=chunk_size,
            use_cache=use_cache,
            **kwargs,
        )
        x = outputs.last_hidden_state
        loss = logits = None
        if labels is not None:
            total = self._loss(x, labels)
            if transcript is not None:
                spoken = self.model.encoder.state_mask(attention_mask)
                total = total + self.config.ctc_weight * self._ctc(
                    outputs.encoder_last_hidden_state, spoken, transcript
                )
            # Trainer counts labels over all parts of a batch: the losses of parts then add up.
            n_items = kwargs.get("num_items_in_batch")
            loss = total / ((labels != IGNORED).sum() if n_items is None else n_items)
        if loss is None or not self.config.loss_without_logits:
            last = isinstance(logits_to_keep, int)
            kept = slice(-logits_to_keep, None) if last else logits_to_keep
            logits = self.lm_head(x[:, kept])
        return Seq2SeqLMOutput(
            loss=loss,  # type: ignore[arg-type]  # Hugging Face means any float tensor.
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.decoder_hidden_states,
            decoder_attentions=outputs.decoder_attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=outputs.encoder_last_hidden_state,
            encoder_hidden_states=outputs.encoder_hidden_states,
            encoder_attentions=outputs.encoder_attentions,
        )

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """What the decoder reads to predict the labels: the start, then all but the last."""
        start = self.config.decoder_start_token_id
        if start is None:
            raise ConfigError("the config has no decoder_start_token_id; give one, or bos_token_id")
        pad = self.config.pad_token_id
        shifted = F.pad(labels[:, :-1], (1, 0), value=start)
        return shifted.masked_fill(shifted == IGNORED, 0 if pad is None else pad)

    def read(self, source: Tensor, states: States | None = None) -> States:
        """Read one more chunk of the source, which sees itself and all before it.

        Args:
            source: tokens `[b, n]`, or frames of speech `[b, n, n_bins]`. Frames that fill no
                state get silence, so only the last chunk should leave some.
            states: what an earlier call returned; None at the start.
        """
        hidden, states = self.model.encoder.read(source, states or States({}))
        return self.model.decoder.read(hidden, states)

    def write(self, tokens: Tensor, states: States) -> tuple[Tensor, States]:
        """Write target tokens `[b, t]`: logits `[b, t, vocab_size]` of what follows each."""
        logits, states, _ = self.write_with_shares(tokens, states, ())
        return logits, states

    def write_with_shares(
        self, tokens: Tensor, states: States, earlier: Sequence[State]
    ) -> tuple[Tensor, States, Tensor | None]:
        """As `write`, with the attention that goes to the source; see `Decoder`."""
        x, states, shares = self.model.decoder.write_with_shares(tokens, states, earlier)
        return self.lm_head(x), states, shares

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        target = labels.flatten().to(x.device)
        smoothing = self.config.label_smoothing if self.training else 0.0
        return head_cross_entropy(x.flatten(0, 1), self.lm_head, target, smoothing)

    def _ctc(self, hidden: Tensor, spoken: Tensor | None, transcript: Tensor) -> Tensor:
        if self.ctc_head is None:
            raise InputError("a transcript is for a model with ctc_weight, and this one has none")
        b, n = hidden.shape[:2]
        full = torch.full((b,), n, device=hidden.device)
        there = transcript != IGNORED
        logits = self.ctc_head(hidden)
        losses = F.ctc_loss(
            logits.log_softmax(dim=-1, dtype=accumulator(logits)).transpose(0, 1),
            transcript[there],
            full if spoken is None else spoken.sum(dim=1),
            there.sum(dim=1),
            blank=self.config.pad_token_id,  # type: ignore[arg-type]  # There is one, or no head.
            reduction="none",
            zero_infinity=True,  # A transcript longer than what was heard has no way to be told.
        )
        # An empty transcript is one that is not known, rather than silence to be told.
        return losses.where(there.any(dim=1), 0).sum()

    def _prepare_cache_for_generation(  # type: ignore[override]  # The rest is passed over.
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Begin generation with a cache of our own kind, where none is given."""
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            cache._is_user_defined = True
        elif generation_config.use_cache is not False:
            cache = model_kwargs["past_key_values"] = TranslationCache(self.config.n_layer)
        if cache is not None and generation_config.is_assistant:
            cache.self_attention_cache.record_draft(generation_config.max_new_tokens or 0)

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """The mask as it is: one of pads is all that the layers need."""
        return attention_mask


class LeapformerForSpeechSeq2Seq(LeapformerForSeq2SeqLM):
    """A model that translates speech: `input_features` in place of `input_ids`."""

    config: LeapformerSpeechConfig
    main_input_name = "input_features"

    def make_model(self) -> LeapformerSeq2SeqModel:
        """The model without a head."""
        return LeapformerSpeechModel(self.config)

    def forward(
        self,
        input_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """As `LeapformerForSeq2SeqLM.forward`, of frames of speech `[b, n, n_bins]`."""
        # Trainer looks at the names here to find out what the labels are, `generate` for what it
        # may be given.
        return super().forward(
            input_features=input_features,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            encoder_outputs=encoder_outputs,
            labels=labels,
            **kwargs,
        )
