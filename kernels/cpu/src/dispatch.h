// The implementations that were built, best first, and the choice of one.
#pragma once
#include "kernels.h"

namespace apexk {

int isa_count();
const Isa &isa_at(int index);
bool isa_available(const Isa &isa);

// `name` null or empty: the best available one.
apexk_status choose_isa(const char *name, const Isa **chosen);

}  // namespace apexk
