// Checks of csrc/core/mask.cuh. Each returns sentences that say what is wrong; none is good.
#pragma once

#include <string>
#include <vector>

// key_range, row_range and visiting_key_tiles of random bands, lengths and every tile of several sizes.
std::vector<std::string> tile_range_findings(unsigned seed, int cases);

// ElementBits and keep_range for all edges on and about a tile.
std::vector<std::string> keep_range_findings();
