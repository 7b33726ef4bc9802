#include "draft_kernel.h"
