#include "launcher/plan.h"

#include <algorithm>
#include <limits>
#include <string>

namespace jaxnorm {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxGridYZ = 65535;
constexpr int64_t kMaxCluster = 16;
constexpr int64_t kMaxTogether = 4096;

Error Invalid(const std::string& what) { return Error::InvalidArgument("jaxnorm: row_program: " + what); }

std::string Text(int64_t number) { return std::to_string(number); }

Error CheckRange(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return Error::Success();
  return Invalid(std::string(name) + " must be from " + Text(least) + " to " + Text(most) + ", got " + Text(value));
}

Error DecodeBuffers(const char* name, const Integers& given, BufferList* buffers) {
  if (given.size > kMaxBuffers) {
    return Invalid(std::string(name) + " must name at most " + Text(kMaxBuffers) + " buffers, got " + Text(given.size));
  }
  for (size_t i = 0; i < given.size; ++i) {
    JAXNORM_RETURN_IF_ERROR(CheckRange(name, given[i], 0, kMaxBuffers - 1));
    buffers->Append(static_cast<int>(given[i]));
  }
  return Error::Success();
}

Error CheckBuffer(int buffer, const Buffers& buffers) {
  if (buffer < buffers.size) return Error::Success();
  return Invalid("buffer " + Text(buffer) + " is asked for, the call has " + Text(buffers.size));
}

Error Multiply(const char* name, int64_t a, int64_t b, int64_t* product) {
  if (!__builtin_mul_overflow(a, b, product)) return Error::Success();
  return Invalid(std::string("the number of ") + name + " does not fit 64 bits");
}

Error SizeOf(const RowDim& dim, const Buffers& buffers, int64_t* size) {
  *size = dim.dimension;
  if (dim.buffer >= 0) {
    JAXNORM_RETURN_IF_ERROR(CheckBuffer(dim.buffer, buffers));
    const Buffer& buffer = buffers[dim.buffer];
    if (dim.dimension >= buffer.rank) {
      return Invalid("dimension " + Text(dim.dimension) + " of buffer " + Text(dim.buffer) + " is asked for, it has " +
                     Text(buffer.rank));
    }
    *size = buffer.dims[dim.dimension];
  }
  if (*size % dim.divisor != 0) {
    return Invalid("a dimension of " + Text(*size) + " is no multiple of " + Text(dim.divisor));
  }
  *size /= dim.divisor;
  if (*size < 0 || *size > kMaxInt) {
    return Invalid("a row dimension must be at most " + Text(kMaxInt) + ", got " + Text(*size));
  }
  return Error::Success();
}

}  // namespace

Error DecodePlan(const Attributes& attributes, Plan* plan) {
  if (attributes.version != Attributes::kVersion) {
    return Invalid("this program has version " + Text(attributes.version) + " of the attributes, this jaxnorm knows " +
                   Text(Attributes::kVersion) + "; install the jaxnorm that made it");
  }
  if (attributes.source.empty()) return Invalid("source must not be empty");
  const Integers& launch = attributes.launch;
  if (launch.size != 7 && launch.size != 8) {
    return Invalid("launch must have 7 or 8 numbers, got " + Text(launch.size));
  }
  if (launch.size == 8) JAXNORM_RETURN_IF_ERROR(CheckRange("together", launch[7], 0, 1));
  plan->together = launch.size == 8 && launch[7] == 1;
  JAXNORM_RETURN_IF_ERROR(CheckRange("threads", launch[0], 1, 1024));
  JAXNORM_RETURN_IF_ERROR(CheckRange("shared_bytes", launch[1], 0, 1 << 20));
  JAXNORM_RETURN_IF_ERROR(CheckRange("cluster", launch[2], 1, plan->together ? kMaxTogether : kMaxCluster));
  JAXNORM_RETURN_IF_ERROR(CheckRange("rows_per_tile", launch[3], 1, kMaxInt));
  JAXNORM_RETURN_IF_ERROR(CheckRange("blocks", launch[4], 0, kMaxInt));
  JAXNORM_RETURN_IF_ERROR(CheckRange("chunk_multiple", launch[5], 1, kMaxInt));
  plan->threads = static_cast<int>(launch[0]);
  plan->shared_bytes = static_cast<int>(launch[1]);
  plan->cluster = static_cast<int>(launch[2]);
  plan->rows_per_tile = launch[3];
  plan->blocks = launch[4];
  plan->chunk_multiple = launch[5];

  const Integers& sizes = attributes.sizes;
  if (sizes.size % 3 != 0 || sizes.size > 3 * kMaxRowDims) {
    return Invalid("sizes must have 3 numbers for each of at most " + Text(kMaxRowDims) + " row dimensions, got " +
                   Text(sizes.size));
  }
  for (size_t i = 0; i < sizes.size; i += 3) {
    JAXNORM_RETURN_IF_ERROR(CheckRange("the buffer of a size", sizes[i], -1, kMaxBuffers - 1));
    JAXNORM_RETURN_IF_ERROR(
        CheckRange("the dimension of a size", sizes[i + 1], 0, std::numeric_limits<int64_t>::max()));
    JAXNORM_RETURN_IF_ERROR(CheckRange("the divisor of a size", sizes[i + 2], 1, kMaxInt));
    plan->sizes.Append({static_cast<int>(sizes[i]), sizes[i + 1], sizes[i + 2]});
  }
  JAXNORM_RETURN_IF_ERROR(CheckRange("group_dims", launch[6], 0, plan->sizes.size));
  plan->group_dims = static_cast<int>(launch[6]);

  JAXNORM_RETURN_IF_ERROR(DecodeBuffers("arguments", attributes.arguments, &plan->arguments));
  JAXNORM_RETURN_IF_ERROR(DecodeBuffers("finish_arguments", attributes.finish_arguments, &plan->finish_arguments));
  const Integers& finish = attributes.finish;
  if (finish.size != 0 && finish.size != 2) return Invalid("finish must have 0 or 2 numbers, got " + Text(finish.size));
  plan->has_finish = finish.size == 2;
  if (!plan->has_finish && plan->finish_arguments.size > 0) return Invalid("finish_arguments need finish");
  if (plan->has_finish) {
    JAXNORM_RETURN_IF_ERROR(CheckRange("the blocks of finish along x", finish[0], 1, kMaxInt));
    JAXNORM_RETURN_IF_ERROR(CheckRange("the blocks of finish along z", finish[1], 1, kMaxGridYZ));
    plan->finish_x = static_cast<int>(finish[0]);
    plan->finish_z = static_cast<int>(finish[1]);
  }
  return Error::Success();
}

Error SizeLaunches(const Plan& plan, const Buffers& buffers, int64_t resident, Launches* launches) {
  for (int buffer : plan.arguments) JAXNORM_RETURN_IF_ERROR(CheckBuffer(buffer, buffers));
  for (int buffer : plan.finish_arguments) JAXNORM_RETURN_IF_ERROR(CheckBuffer(buffer, buffers));

  int64_t groups = 1, group_rows = 1;
  for (int k = 0; k < plan.sizes.size; ++k) {
    int64_t size;
    JAXNORM_RETURN_IF_ERROR(SizeOf(plan.sizes[k], buffers, &size));
    launches->dims[k] = static_cast<int32_t>(size);
    if (k < plan.group_dims) {
      JAXNORM_RETURN_IF_ERROR(Multiply("groups", groups, size, &groups));
    } else {
      JAXNORM_RETURN_IF_ERROR(Multiply("rows", group_rows, size, &group_rows));
    }
  }
  JAXNORM_RETURN_IF_ERROR(Multiply("rows", groups, group_rows, &launches->rows));
  if (groups > kMaxInt)
    return Invalid("at most " + Text(kMaxInt) + " groups of rows are possible, got " + Text(groups));
  launches->groups = static_cast<int32_t>(groups);

  int64_t chunks = 0;
  if (launches->rows > 0) {
    const int64_t tiles = group_rows / plan.rows_per_tile + (group_rows % plan.rows_per_tile != 0);
    chunks = tiles;
    if (plan.blocks > 0) {
      const int64_t limit = std::min(plan.blocks, std::max<int64_t>(resident, 1));
      chunks = std::clamp<int64_t>(limit / groups, 1, tiles);
      if (chunks >= plan.chunk_multiple) {
        chunks -= chunks % plan.chunk_multiple;
      } else if (chunks < tiles) {
        // A smaller GPU than the plan was made for: some blocks wait for others.
        chunks = std::min(plan.chunk_multiple, tiles);
        if (groups * chunks > std::max(plan.blocks, groups)) {
          return Invalid(Text(groups) + " groups of rows need " + Text(groups * chunks) + " blocks, the plan has " +
                         Text(plan.blocks));
        }
      }
    }
    // Blocks that wait for others which have not begun would wait for ever.
    if (plan.together && groups * chunks > resident) {
      return Invalid(Text(groups * chunks * plan.cluster) + " blocks must run at once, the GPU runs " +
                     Text(resident * plan.cluster));
    }
    if (chunks > kMaxInt / groups / plan.cluster) {
      return Invalid(Text(launches->rows) + " rows in tiles of " + Text(plan.rows_per_tile) + " need more than " +
                     Text(kMaxInt) + " blocks");
    }
  }
  launches->chunks = static_cast<int32_t>(chunks);
  launches->grid = {static_cast<unsigned>(groups * chunks * plan.cluster), 1, 1};

  launches->finish_grid = {0, 0, 0};
  launches->finish_threads_y = 0;
  if (plan.has_finish) {
    const int64_t finish_y = std::clamp<int64_t>(groups, 1, kMaxGridYZ);
    launches->finish_grid = {static_cast<unsigned>(plan.finish_x), static_cast<unsigned>(finish_y),
                             static_cast<unsigned>(plan.finish_z)};
    unsigned y = 1;
    while (y < 32 && (plan.group_dims == 0 || y < chunks)) y *= 2;
    launches->finish_threads_y = y;
  }
  return Error::Success();
}

}  // namespace jaxnorm
