import pytest

from hitsend.core import errors


def leaves(kind: type[errors.ServeError]) -> list[type[errors.ServeError]]:
    below = kind.__subclasses__()
    return [leaf for child in below for leaf in leaves(child)] if below else [kind]


# A leaf whose subclass has a code of its own (NotFound, ModelNotFound) is itself raised too.
RAISED = {*leaves(errors.ServeError), errors.NotFound}


@pytest.mark.parametrize("kind", sorted(RAISED, key=lambda kind: kind.code))
def test_an_error_that_crossed_a_process_is_the_error_it_was(kind: type[errors.ServeError]):
    same = errors.from_code(kind.code, "why", param="p", retry_after_s=2.0)
    assert type(same) is kind
    assert (same.status, same.message, same.param, same.retry_after_s) == (kind.status, "why", "p", 2.0)


@pytest.mark.parametrize("code", ["internal_error", "from_the_future"])
def test_other_codes_are_plain_serve_errors(code: str):
    assert type(errors.from_code(code, "why")) is errors.ServeError
