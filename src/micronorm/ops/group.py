"""The rule that chooses the number of channel groups, for GroupNorm and BatchChannelNorm."""


def choose_groups(num_channels: int, *, groups: int = 32, min_channels_per_group: int = 2) -> int:
    """Return the number of groups for a layer of `num_channels` channels.

    It is `groups` if that divides the channels with at least p = `min_channels_per_group` each. Otherwise it is the
    largest divisor of the channels that is at most min(groups, channels // max(4, p)), and at least 1.

    Example:
        >>> [choose_groups(c) for c in (256, 64, 48, 16, 3)]
        [32, 32, 12, 4, 1]
        >>> choose_groups(64, min_channels_per_group=4)
        16
    """
    check_count("num_channels", num_channels)
    check_count("groups", groups)
    check_count("min_channels_per_group", min_channels_per_group)
    if num_channels % groups == 0 and num_channels // groups >= min_channels_per_group:
        return groups
    limit = min(groups, num_channels // max(4, min_channels_per_group))
    return next((g for g in range(limit, 1, -1) if num_channels % g == 0), 1)


def check_count(name: str, value: int) -> None:
    """Raise if the value is not an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
