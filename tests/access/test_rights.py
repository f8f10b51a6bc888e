import pytest

from hitsend.core.errors import ModelNotFound, PermissionDenied
from hitsend.core.limits import Level, Limits
from hitsend.core.request import Principal
from hitsend.serve.access.keys import StoredKey
from hitsend.serve.access.rights import Directory, Names, check_model, may_use
from hitsend.serve.access.rows import StoredPrincipal
from hitsend.serve.access.terms import Terms


def stored(kind, *path, disabled=False, **terms):
    return StoredPrincipal(kind, path, Terms(**terms), 1.0, 2.0 if disabled else None)


def key(user=None, app=None, org=None, **fields):
    return StoredKey("k1", "00", "00", "alice", user, app, org, 1.0, **fields)


def limits(number):
    return Limits(requests_per_minute=number)


EVERY = (
    stored("global", limits=limits(1)),
    stored("org", "o", limits=limits(2)),
    stored("app", "o", "a", limits=limits(3)),
    stored("user", "o", "a", "u", limits=limits(4)),
)


def test_levels_go_from_global_to_the_key():
    found = Directory(EVERY).principal_of(key("u", "a", "o", terms=Terms(limits(5))))
    assert found.levels == (
        Level("global", (), limits(1)),
        Level("org", ("o",), limits(2)),
        Level("app", ("o", "a"), limits(3)),
        Level("user", ("o", "a", "u"), limits(4)),
        Level("key", ("k1",), limits(5)),
    )


def test_levels_without_limits_and_levels_of_others_are_left_out():
    others = (stored("org", "p", limits=limits(2)), stored("app", "", "a", limits=limits(3)), stored("org", "o"))
    assert Directory(others).principal_of(key("u", "a", "o")).levels == ()
    assert Directory().principal_of(key()).levels == ()


@pytest.mark.parametrize(
    ("names", "kind", "path"),
    [
        (Names(app="a"), "app", ("", "a")),
        (Names(user="u"), "user", ("", "", "u")),
        (Names(user="u", org="o"), "user", ("o", "", "u")),
        (Names(user="u", app="a"), "user", ("", "a", "u")),
    ],
)
def test_a_name_that_is_missing_is_empty_in_the_path(names, kind, path):
    level = stored(kind, *path, limits=limits(9))
    assert Directory([level]).compose(names).levels == (Level(kind, path, limits(9)),)


@pytest.mark.parametrize("level", range(1, 4))
def test_a_disabled_level_refuses_all_beneath_it_and_nobody_else(level):
    off = EVERY[level]
    directory = Directory(
        [*EVERY[:level], StoredPrincipal(off.kind, off.path, off.terms, 1.0, 2.0), *EVERY[level + 1 :]]
    )
    assert directory.principal_of(key("u", "a", "o")) is None
    assert directory.principal_of(key("v", "b", "p")) is not None
    assert directory.principal_of(key()) is not None


def test_models_are_those_that_every_level_allows():
    directory = Directory([stored("global", models=("a", "b", "c")), stored("org", "o", models=("b", "c", "d"))])
    assert directory.principal_of(key()).models == ("a", "b", "c")
    assert directory.principal_of(key(org="o")).models == ("b", "c")
    assert directory.principal_of(key(org="o", terms=Terms(models=("c", "e")))).models == ("c",)
    assert directory.principal_of(key(org="o", terms=Terms(models=("z",)))).models == ()
    assert Directory().principal_of(key()).models is None


@pytest.mark.parametrize(
    ("above", "own", "expected"),
    [
        ({}, {}, (1, 1)),
        ({"tier": 3}, {}, (3, 3)),
        ({"tier": 3}, {"tier": 0}, (0, 0)),
        ({"max_tier": 2}, {"tier": 0}, (2, 2)),
        ({"max_tier": 0}, {}, (1, 0)),
        ({"max_tier": 0, "tier": 4}, {"max_tier": 2}, (4, 2)),
        ({"max_tier": 3}, {"max_tier": 0, "tier": 1}, (3, 3)),
    ],
)
def test_the_nearest_tier_counts_within_the_worst_bound(above, own, expected):
    found = Directory([stored("org", "o", **above)]).principal_of(key(org="o", terms=Terms(**own)))
    assert (found.tier, found.max_tier) == expected
    assert found.max_tier <= found.tier


def test_a_served_model_is_denied_by_name_and_others_are_not_told():
    caller = Principal(key_id="k", models=("a",))
    check_model(caller, "a", ("a", "b"))
    with pytest.raises(PermissionDenied, match="'b'"):
        check_model(caller, "b", ("a", "b"))
    with pytest.raises(ModelNotFound) as refused:
        check_model(caller, "c", ("a", "b"))
    assert "served: a" in refused.value.message
    assert "b" not in refused.value.message.partition("served: ")[2]
    with pytest.raises(ModelNotFound, match="served: a, b"):
        check_model(Principal(), "c", ("a", "b"))
    assert not may_use(Principal(models=()), "a")
