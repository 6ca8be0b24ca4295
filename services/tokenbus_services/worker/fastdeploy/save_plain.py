"""The save ops without logprobs, by that engine's names and positions.

Each returns when its message is on its way, or raises what is wrong with it before anything of it is sent.
"""

import numpy as np

from tokenbus_contracts import SpeculativeMethod
from tokenbus_services.worker.fastdeploy import inputs, reading
from tokenbus_services.worker.fastdeploy.arguments import Lengths, cleared, is_sent, preempted_slots, with_preempted
from tokenbus_services.worker.fastdeploy.layout import SLOTS, SPECULATIVE_SLOTS, TOKENS, MessageFlag
from tokenbus_services.worker.fastdeploy.message import Message, Tensor
from tokenbus_services.worker.fastdeploy.process import PROCESS


def speculate_save_output(*arguments: Tensor) -> None:
    """Save a step's accepted tokens, a line for each slot.

    By position: accept_tokens, accept_num, not_need_stop, seq_lens_decoder, prompt_lens, preempted_idx, rank_id,
    save_each_rank, skip_chunk_prefill. There are 8 without preempted_idx.
    """
    given = with_preempted("speculate_save_output", arguments, 9, 6)
    accept_tokens, accept_num, not_need_stop, decoder, prompt, preempted, rank, each_rank, skip_chunk_prefill = given
    with cleared(preempted):
        if not is_sent(int(rank), each=bool(each_rank)):
            return
        ids = inputs.lines_of_slots("accept_tokens", accept_tokens, SPECULATIVE_SLOTS)
        slots, width = ids.shape
        lengths = Lengths.of(decoder, prompt, slots)
        counts = reading.counts(
            "accept_num",
            inputs.line("accept_num", accept_num, slots),
            min(TOKENS, width),
            prefilling=lengths.prefilling if skip_chunk_prefill else None,
            preempted=preempted_slots(preempted, slots),
        )
        found = ids[np.arange(width) < counts[:, None]]
        counts, kept = reading.without_nothing("accept_tokens", counts, found)
        message = Message(
            flag=MessageFlag.TARGET,
            is_running=inputs.truth("not_need_stop", not_need_stop),
            counts=counts,
            token_ids=found[kept],
            prefilling=lengths.prefilling,
            decoder_lengths=lengths.decoder,
            prompt_lengths=lengths.prompt,
        )
        PROCESS.sender(int(rank)).save(message, PROCESS.options.method)


def mtp_save_first_token(  # noqa: PLR0913, PLR0917 - by that engine's positions
    base_model_draft_tokens: Tensor,
    not_need_stop: Tensor,
    seq_lens_decoder: Tensor,
    prompt_lens: Tensor,
    step_idx: Tensor,
    rank_id: int,
    save_each_rank: bool,  # noqa: FBT001 - as above
    skip_chunk_prefill: bool,  # noqa: FBT001 - as above
    /,
) -> None:
    """Save a prefill's first tokens, each with the first draft id, of the slots that are at their first step."""
    if not is_sent(rank_id, each=save_each_rank):
        return
    ids = inputs.lines_of_slots("base_model_draft_tokens", base_model_draft_tokens, SPECULATIVE_SLOTS, least=2)
    slots = ids.shape[0]
    lengths = Lengths.of(seq_lens_decoder, prompt_lens, slots)
    at_first = inputs.line("step_idx", step_idx, slots) == 1
    if skip_chunk_prefill:
        at_first &= ~lengths.prefilling
    counts, _ = reading.without_nothing("base_model_draft_tokens", at_first.astype(np.int64), ids[at_first, 0])
    drafted = ids[counts > 0, 1]
    reading.check_ids("base_model_draft_tokens", drafted)
    message = Message(
        flag=MessageFlag.TARGET,
        is_running=inputs.truth("not_need_stop", not_need_stop),
        counts=counts,
        token_ids=ids[counts > 0, 0],
        proposal_counts=counts,
        proposal_ids=drafted,
        prefilling=lengths.prefilling,
        decoder_lengths=lengths.decoder,
        prompt_lengths=lengths.prompt,
    )
    PROCESS.sender(rank_id).save(message, SpeculativeMethod.MTP)


def save_output(*arguments: Tensor) -> None:
    """Save a step without speculation and without logprobs: one token a slot.

    By position: sampled_token_ids, not_need_stop, preempted_idx, rank_id, save_each_rank. There are 4 without
    preempted_idx.
    """
    sampled, not_need_stop, preempted, rank, each_rank = with_preempted("save_output", arguments, 5, 3)
    with cleared(preempted):
        if not is_sent(int(rank), each=bool(each_rank)):
            return
        ids = inputs.one_of_each_slot("sampled_token_ids", sampled, SLOTS)
        counts = reading.counts_of_tokens("sampled_token_ids", ids, preempted_slots(preempted, ids.size))
        message = Message(
            flag=MessageFlag.TARGET,
            is_running=inputs.truth("not_need_stop", not_need_stop),
            counts=counts,
            token_ids=ids[counts > 0],
        )
        PROCESS.sender(int(rank)).save(message, SpeculativeMethod.NONE)
