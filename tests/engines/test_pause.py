"""A demo engine that operators pause: what requests get meanwhile and afterwards."""

from tests.engines.runs import asked, ngram
from tokenbus_contracts import RowStatus


def test_aborted_request_ends_while_it_is_paused() -> None:
    run = ngram([asked(key, max_tokens=300, ignore_end_token=True) for key in (1, 2)], max_running=1)
    run.step()
    run.engine.pause(running=True)
    assert not run.engine.has_work
    run.engine.abort(1)
    run.engine.abort(2)
    run.to_the_end()
    assert [run.got[key].statuses[-1] for key in (1, 2)] == [RowStatus.ABORTED] * 2
    run.admit(asked(3, max_tokens=2, ignore_end_token=True))
    assert not run.engine.has_work
    run.engine.resume()
    assert len(run.to_the_end().got[3].tokens) == 2


def test_those_that_run_end_though_they_are_preempted() -> None:
    """New ones wait, and do not take the places of those that have begun."""
    requests = [asked(key, seed=key, max_tokens=40, ignore_end_token=True) for key in range(1, 6)]
    run = ngram(requests, max_running=2, slice_steps=1)
    while len([key for key in run.got if run.got[key].tokens]) < 4:
        run.step()
    begun = {key for key in run.got if run.got[key].tokens}
    late = asked(9, seed=9, max_tokens=3, ignore_end_token=True)
    run.engine.pause(running=False)
    run.admit(late)
    run.to_the_end()
    assert {key for key in run.got if run.got[key].tokens} == begun
    assert all(len(run.got[key].tokens) == 40 for key in begun)
    run.engine.resume()
    run.to_the_end()
    assert len(run.got[9].tokens) == 3
    assert all(len(run.got[key].tokens) == 40 for key in range(1, 6))
