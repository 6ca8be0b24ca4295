"""The save ops with logprobs, by that engine's names and positions.

Each returns when its message is on its way, or raises what is wrong with it before anything of it is sent.
"""

import numpy as np

from tokenbus_contracts import ContractError, Rule, SpeculativeMethod
from tokenbus_services.worker.fastdeploy import inputs, reading
from tokenbus_services.worker.fastdeploy.arguments import Speculated, cleared, is_sent, preempted_slots, with_preempted
from tokenbus_services.worker.fastdeploy.layout import COLUMNS, SLOTS, TOKENS, MessageFlag
from tokenbus_services.worker.fastdeploy.message import Message, Tensor
from tokenbus_services.worker.fastdeploy.process import PROCESS
from tokenbus_services.worker.fastdeploy.scoring import ScoreTensors, scores_of


def speculate_save_output_topk(*arguments: Tensor) -> None:
    """Save a step's accepted tokens (message flag 3), or what was drafted for them (4).

    By position: sampled_token_ids, logprob_token_ids, logprob_scores, logprob_ranks, token_num_per_batch,
    cu_batch_token_offset, not_need_stop, seq_lens_decoder, prompt_lens, preempted_idx, message_flag, rank_id,
    save_each_rank. There are 12 without preempted_idx, and 9 also without the lengths and save_each_rank.
    """
    given = Speculated.of("speculate_save_output_topk", arguments)
    with cleared(given.preempted):
        if not is_sent(given.rank, each=given.each_rank):
            return
        flag = reading.message_flag(given.flag)
        slots = inputs.slots("token_num_per_batch", given.token_numbers, SLOTS)
        lengths = given.lengths(slots)
        prefilling = None if lengths is None else lengths.prefilling
        counts = reading.counts(
            "token_num_per_batch",
            inputs.line("token_num_per_batch", given.token_numbers, slots),
            TOKENS,
            prefilling=prefilling,
            preempted=preempted_slots(given.preempted, slots),
        )
        sampled = inputs.integers("sampled_token_ids", given.sampled).reshape(-1)
        places = reading.places_of(counts, inputs.line("cu_batch_token_offset", given.offsets, slots), sampled.size)
        counts, kept = reading.without_nothing("sampled_token_ids", counts, sampled[places])
        places = places[kept]
        message = Message(
            flag=flag,
            is_running=inputs.truth("not_need_stop", given.not_need_stop),
            counts=counts,
            token_ids=sampled[places],
            scores=scores_of(given.scores, sampled[places], places),
            prefilling=prefilling,
            decoder_lengths=None if lengths is None else lengths.decoder,
            prompt_lengths=None if lengths is None else lengths.prompt,
        )
        PROCESS.sender(given.rank).save(message, PROCESS.options.method)


def mtp_save_first_token_with_topk(*arguments: Tensor) -> None:
    """Save a prefill's first tokens, with their logprobs, and the draft ids that a decode worker goes on with.

    By position as `speculate_save_output_topk` with 13. A slot with n accepted tokens has n + 1 ids in its line of
    sampled_token_ids, the first of which is its token.
    """
    given = Speculated.of("mtp_save_first_token_with_topk", arguments, only_today=True)
    with cleared(given.preempted):
        if not is_sent(given.rank, each=given.each_rank):
            return
        flag = reading.message_flag(given.flag)
        if flag is not MessageFlag.TARGET:
            raise ContractError("message_flag", "3 (target): a first token is no draft", int(flag), rule=Rule.NAMED)
        slots = inputs.slots("token_num_per_batch", given.token_numbers, SLOTS)
        ids = inputs.lines_of_slots("sampled_token_ids", given.sampled, SLOTS)
        if ids.shape[0] < slots:
            raise ContractError(
                "sampled_token_ids", f"{slots} lines, one for each slot", ids.shape[0], rule=Rule.LENGTH
            )
        lengths = given.lengths(slots)
        accepted = reading.counts(
            "token_num_per_batch",
            inputs.line("token_num_per_batch", given.token_numbers, slots),
            min(TOKENS, ids.shape[1]) - 1,  # there is one entry more than is accepted
            prefilling=None if lengths is None else lengths.prefilling,
            preempted=preempted_slots(given.preempted, slots),
        )
        counts, _ = reading.without_nothing("sampled_token_ids", np.minimum(accepted, 1), ids[:slots, 0][accepted > 0])
        proposals = np.where(counts > 0, accepted, 0)
        drafted = ids[:slots, 1:][np.arange(ids.shape[1] - 1) < proposals[:, None]]
        reading.check_ids("sampled_token_ids", drafted)
        offsets = inputs.line("cu_batch_token_offset", given.offsets, slots)
        lines = inputs.table("logprob_token_ids", given.scores.ids, COLUMNS).shape[0]
        places = reading.places_of(counts, offsets, lines)
        first = ids[:slots, 0][counts > 0]
        message = Message(
            flag=flag,
            is_running=inputs.truth("not_need_stop", given.not_need_stop),
            counts=counts,
            token_ids=first,
            scores=scores_of(given.scores, first, places),
            proposal_counts=proposals,
            proposal_ids=drafted,
            prefilling=None if lengths is None else lengths.prefilling,
            decoder_lengths=None if lengths is None else lengths.decoder,
            prompt_lengths=None if lengths is None else lengths.prompt,
        )
        PROCESS.sender(given.rank).save(message, SpeculativeMethod.MTP)


def save_output_topk(*arguments: Tensor) -> None:
    """Save a step without speculation: one token a slot, with its logprobs.

    By position: sampled_token_ids, logprob_token_ids, logprobs, ranks, not_need_stop, preempted_idx, rank_id. There
    are 6 without preempted_idx.
    """
    given = with_preempted("save_output_topk", arguments, 7, 6)
    sampled, logprob_ids, logprobs, ranks, not_need_stop, preempted, rank = given
    with cleared(preempted):
        if not is_sent(int(rank), each=False):
            return
        ids = inputs.one_of_each_slot("sampled_token_ids", sampled, SLOTS)
        counts = reading.counts_of_tokens("sampled_token_ids", ids, preempted_slots(preempted, ids.size))
        places = np.flatnonzero(counts > 0)
        tensors = ScoreTensors(logprob_ids, logprobs, ranks, ("logprob_token_ids", "logprobs", "ranks"))
        message = Message(
            flag=MessageFlag.TARGET,
            is_running=inputs.truth("not_need_stop", not_need_stop),
            counts=counts,
            token_ids=ids[places],
            scores=scores_of(tensors, ids[places], places),
        )
        PROCESS.sender(int(rank)).save(message, SpeculativeMethod.NONE)
