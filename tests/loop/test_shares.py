from hitsend.serve.loop.shares import HALF_LIFE_S, OVER, REMEMBER_S, Shares, most_waiting, path_of


def path(*names):
    return path_of(names)


def test_what_somebody_had_fades_and_the_silent_are_forgotten():
    shares = Shares()
    shares.serve(path("a", "x"), 1000, 0.0)
    shares.serve(path("b", "x"), 600, HALF_LIFE_S)
    assert shares.order(path("a", "x"), HALF_LIFE_S) < shares.order(path("b", "x"), HALF_LIFE_S)
    for second in range(1, int(REMEMBER_S) + 3):
        shares.serve(path("b", "x"), 1, HALF_LIFE_S + second)
    assert set(shares.root.children) == {"b"}


def test_a_waiting_or_running_tenant_is_never_forgotten():
    shares = Shares()
    shares.wait(path("waits"), 1, 1, 0.0)
    shares.run(path("runs"), 1, 0.0)
    shares.serve(path("b"), 1, 10 * REMEMBER_S)
    assert set(shares.root.children) == {"waits", "runs", "b"}


def test_over_its_share_is_who_has_more_than_an_equal_part_at_some_level():
    shares = Shares()
    shares.serve(path("alone", "u"), 1000, 0.0)
    assert not shares.is_over(path("alone", "u"), 0.0)
    shares.serve(path("big", "greedy"), 900, 0.0)
    shares.serve(path("big", "modest"), 100, 0.0)
    assert not shares.is_over(path("alone", "u"), 0.0)
    assert shares.is_over(path("big", "greedy"), 0.0)
    assert not shares.is_over(path("big", "modest"), 0.0)
    shares.serve(path("alone", "u"), int(2000 * OVER), 0.0)
    assert shares.is_over(path("alone", "u"), 0.0)


def test_the_longest_queue_is_found_level_by_level():
    waiting = {path("crowd", f"user{number}"): 1 for number in range(30)} | {path("greedy", "u"): 20}
    assert most_waiting(waiting, path("new", "u"), 1)[0] == "crowd"
    waiting[path("greedy", "u")] = 40
    assert most_waiting(waiting, path("new", "u"), 1) == path("greedy", "u")


def test_among_equals_the_newcomer_yields():
    waiting = {path("a"): 3, path("b"): 2}
    assert most_waiting(waiting, path("b"), 1) == path("b")
    assert most_waiting(waiting, path("c"), 1) == path("a")
    assert most_waiting({}, path("c"), 1) == path("c")
