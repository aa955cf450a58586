"""Where defects of the scheduler's brain show that are hard to find: a walk's seed, or a scenario.

Looked into first. What a defect doesn't show in any more is searched for anew, so this only saves time.
"""

from __future__ import annotations

FOUND_IN: dict[str, int | str] = {
    "a late word renews the lease": 111,
    "back-off is never reset": 54,
    "strikes aren't carried over": "test_strikes_are_carried_over_to_the_next_scheduler",
    "exclusion is forgiven by a strike": "test_exclusion_outlasts_a_strike_for_what_a_predecessor_handed_over",
    "nobody gives up waiting": "test_loss_of_too_many_workers_ends_the_run_with_a_capacity_error",
    "wrong weights are believed": 39,
    "a claim isn't kept": "test_delta_of_a_joiner_found_wrong_before_the_round_closes_is_left_out",
    "what was handed over with wrong weights stays": "test_delta_of_a_joiner_found_wrong_before_the_round_closes_is_left_out",  # noqa: E501
    "of two wrong joiners one is left out": "test_round_that_one_of_two_wrong_joiners_closes_is_without_the_other_one",
    "a delta is taken twice": 44,
    "an idle worker isn't given a lost one's work": "test_all_workers_with_samples_lost_leave_their_work_to_idle_ones",
    "a grace time never ends": "test_quorum_with_a_hung_worker_goes_on_after_the_grace_time",
    "the verdict is taken twice": 267,
    "rejected samples count as used": "test_strikes_exclude_a_worker_and_too_few_slots_end_the_run",
    "the state is written down before the strikes": "test_excluded_worker_stays_excluded_after_a_resume",
    "the result is waited for from the lost": 456,
    "a lost share isn't handed out": "test_worker_that_lives_and_never_evaluates_is_replaced_after_the_stall_time",
    "nobody limits the wait for an evaluation": 111,
    "a correction drops what is to be evaluated": 33,
    "a blank plan uses up the inner state": "test_successor_of_a_worker_that_had_handed_over_restores_in_the_next_round",  # noqa: E501
    "inner states are forgotten by the next scheduler": 115,
    "replay begins with fewer workers": 47,
    "a delta waits for ever": "test_round_is_as_many_deltas_as_there_are_workers_whoever_they_are_of",
    "a rejected delta's samples stay given out": 41,
    "a disowned delta is merged": "test_delta_of_a_joiner_that_began_with_other_weights_is_left_out",
    "what a lost worker should evaluate is waited for": "test_evaluation_whose_worker_is_lost_is_left_out_and_the_next_one_is_made",  # noqa: E501
    "a step has the number of the one before": "test_worker_whose_deltas_are_rejected_is_excluded_and_the_run_goes_on",
    "a verdict on other deltas is taken": "test_verdict_that_comes_again_is_passed_over",
    "a joiner is to evaluate weights that it doesn't get": "test_joiner_that_comes_after_the_weights_of_a_lost_share_doesnt_evaluate_it",  # noqa: E501
    "steps begin anew": "test_next_scheduler_goes_on_from_the_last_commit_with_steps_that_go_on",
    "the rest of a turn isn't taken back": 122,
    "a resized turn drops what is done": "test_period_says_how_many_deltas_make_a_round",
    "turns end when they will": "test_period_says_how_many_deltas_make_a_round",
    "a verdict is taken out of turn": 279,
    "what is left over isn't released": "test_samples_of_a_worker_lost_while_its_round_is_reduced_come_back",
    "who merges or evaluates may do so for ever": "test_worker_that_lives_and_never_evaluates_is_replaced_after_the_stall_time",  # noqa: E501
    "deltas of another turn are taken": "test_repeated_delta_is_passed_over",
    "break-downs are never forgotten": 201,
    "a slice isn't sent to a successor": "test_lost_worker_is_replaced_in_mid_round_and_its_successor_trains_in_it",
    "an excluded number is given away": 41,
    "strikes aren't counted": 41,
}
