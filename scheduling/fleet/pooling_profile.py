"""Performance profiles of models that pool: prefill alone."""

from scheduling.fleet.profile import Profile


def profile_of_prefills(t0_s: float, a_s: float, b_s_per_token: float, c_s_per_token2: float) -> Profile:
    """Return the profile of a model that pools, from the coefficients of its prefills.

    It never decodes; a decode step would take as long as the shortest prefill. Raises ValueError as `Profile` does.
    """
    shortest_s = max(t0_s, a_s + b_s_per_token + c_s_per_token2)
    return Profile(t0_s, a_s, b_s_per_token, c_s_per_token2, max(shortest_s, 0.0), 0.0, 0.0)
