#include "sample_kernel.h"
