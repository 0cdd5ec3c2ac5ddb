"""Operations that compute a run for some rows at a time, as emitted code calls them."""
