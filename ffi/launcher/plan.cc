#include "launcher/plan.h"

#include <algorithm>
#include <limits>
#include <string>

namespace jaxnorm {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxLong = std::numeric_limits<int64_t>::max();
constexpr int64_t kMaxGridYZ = 65535;
constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kMaxCluster = 16, kMaxCooperativeCluster = 4096;
constexpr int64_t kBufferAlignment = 16;  // of XLA's buffers, at least
constexpr int64_t kCooperative = 1, kEarly = 2;
// A persistent block's beginning and end take about as long as so many tiles.
constexpr int64_t kTilesOfStart = 16;

std::string Text(int64_t number) { return std::to_string(number); }

// Reads the numbers of an attribute one after the other, and checks them.
class Reader {
 public:
  Reader(const Plan& plan, const Integers& numbers) : plan_(plan), numbers_(numbers) {}

  bool done() const { return next_ == numbers_.size; }

  template <typename T>
  Error Read(const char* name, int64_t least, int64_t most, T* value) {
    if (done()) return plan_.Invalid(std::string("launches ends where ") + name + " should be");
    const int64_t number = numbers_[next_++];
    if (number < least || number > most) {
      return plan_.Invalid(std::string(name) + " must be from " + Text(least) + " to " + Text(most) + ", got " +
                           Text(number));
    }
    *value = static_cast<T>(number);
    return Error::Success();
  }

 private:
  const Plan& plan_;
  const Integers& numbers_;
  size_t next_ = 0;
};

Error DecodeWord(const Plan& plan, Reader* reader, Word* word) {
  JAXNORM_RETURN_IF_ERROR(reader->Read("the kind of a word", 0, Word::kKinds - 1, &word->kind));
  int64_t least = std::numeric_limits<int64_t>::min(), most = kMaxLong;
  if (word->kind == Word::kBuffer) least = 0, most = kMaxBuffers - 1;
  if (word->kind == Word::kRowDim) least = 0, most = int64_t{plan.rows.sizes.size} - 1;
  JAXNORM_RETURN_IF_ERROR(reader->Read("the buffer or dimension of a word", least, most, &word->value));
  JAXNORM_RETURN_IF_ERROR(reader->Read("the offset of a word", 0, kMaxLong, &word->offset));
  const bool of_rows = word->kind >= Word::kRows && word->kind <= Word::kRowDim;
  if (of_rows && !plan.has_rows) return plan.Invalid("a word of rows needs row_tiles");
  if (word->kind == Word::kBuffer && word->offset > 0) {
    const bool known = word->value < static_cast<int64_t>(plan.buffer_bytes.size());
    if (!known || word->offset > plan.buffer_bytes[word->value]) {
      return plan.Invalid("an offset of " + Text(word->offset) + " bytes lies beyond buffer " + Text(word->value));
    }
  }
  return Error::Success();
}

Error DecodeLaunch(const Plan& plan, Reader* reader, Launch* launch) {
  int64_t flags;
  const auto kernels = static_cast<int64_t>(plan.kernels.size());
  JAXNORM_RETURN_IF_ERROR(reader->Read("the kernel of a launch", 0, kernels - 1, &launch->kernel));
  JAXNORM_RETURN_IF_ERROR(reader->Read("the rule of a grid", 0, 2, &launch->rule));
  JAXNORM_RETURN_IF_ERROR(reader->Read("the blocks along x", 1, kMaxInt, &launch->grid.x));
  JAXNORM_RETURN_IF_ERROR(reader->Read("the blocks along y", 1, kMaxGridYZ, &launch->grid.y));
  JAXNORM_RETURN_IF_ERROR(reader->Read("the blocks along z", 1, kMaxGridYZ, &launch->grid.z));
  JAXNORM_RETURN_IF_ERROR(reader->Read("threads", 1, kMaxThreads, &launch->block.x));
  JAXNORM_RETURN_IF_ERROR(reader->Read("the threads along y", 1, kMaxThreads, &launch->block.y));
  JAXNORM_RETURN_IF_ERROR(reader->Read("the threads along z", 1, 64, &launch->block.z));
  JAXNORM_RETURN_IF_ERROR(reader->Read("shared_bytes", 0, 1 << 20, &launch->shared_bytes));
  JAXNORM_RETURN_IF_ERROR(reader->Read("cluster", 1, kMaxCooperativeCluster, &launch->cluster));
  JAXNORM_RETURN_IF_ERROR(reader->Read("the flags of a launch", 0, kCooperative | kEarly, &flags));
  launch->cooperative = flags & kCooperative;
  launch->early = flags & kEarly;
  if (launch->clustered() && launch->cluster > kMaxCluster) {
    return plan.Invalid("cluster must be from 1 to " + Text(kMaxCluster) + ", got " + Text(launch->cluster));
  }
  const int64_t threads = int64_t{launch->block.x} * launch->block.y * launch->block.z;
  if (threads > kMaxThreads) return plan.Invalid("threads must be from 1 to 1024, got " + Text(threads));
  if (launch->rule != Rule::kFixed && !plan.has_rows) return plan.Invalid("a grid by a rule needs row_tiles");
  if (launch->rule == Rule::kFixed && launch->grid.x % launch->cluster != 0) {
    return plan.Invalid(Text(launch->grid.x) + " blocks are no multiple of clusters of " + Text(launch->cluster));
  }
  int64_t arguments, total = 0;
  JAXNORM_RETURN_IF_ERROR(reader->Read("the number of arguments", 0, kMaxArguments, &arguments));
  for (int64_t i = 0; i < arguments; ++i) {
    int64_t words;
    JAXNORM_RETURN_IF_ERROR(reader->Read("the number of an argument's words", 1, kMaxWords - total, &words));
    total += words;
    launch->words.push_back(static_cast<int>(words));
    for (int64_t k = 0; k < words; ++k) {
      Word word;
      JAXNORM_RETURN_IF_ERROR(DecodeWord(plan, reader, &word));
      launch->all_words.push_back(word);
    }
  }
  return Error::Success();
}

Error DecodeRows(const Attributes& attributes, Plan* plan) {
  const Integers &tiles = attributes.row_tiles, &sizes = attributes.sizes;
  if (tiles.size != 0 && tiles.size != 4) {
    return plan->Invalid("row_tiles must have 0 or 4 numbers, got " + Text(static_cast<int64_t>(tiles.size)));
  }
  if (sizes.size % 3 != 0 || sizes.size > 3 * kMaxRowDims) {
    return plan->Invalid("sizes must have 3 numbers for each of at most " + Text(kMaxRowDims) +
                         " row dimensions, got " + Text(static_cast<int64_t>(sizes.size)));
  }
  plan->has_rows = tiles.size > 0;
  RowTiles& rows = plan->rows;
  for (Reader reader(*plan, sizes); !reader.done();) {
    RowDim dim;
    JAXNORM_RETURN_IF_ERROR(reader.Read("the buffer of a size", -1, kMaxBuffers - 1, &dim.buffer));
    JAXNORM_RETURN_IF_ERROR(reader.Read("the dimension of a size", 0, kMaxLong, &dim.dimension));
    JAXNORM_RETURN_IF_ERROR(reader.Read("the divisor of a size", 1, kMaxInt, &dim.divisor));
    rows.sizes.Append(dim);
  }
  if (!plan->has_rows) return Error::Success();
  Reader reader(*plan, tiles);
  JAXNORM_RETURN_IF_ERROR(reader.Read("rows_per_tile", 1, kMaxInt, &rows.rows_per_tile));
  JAXNORM_RETURN_IF_ERROR(reader.Read("blocks", 0, kMaxInt, &rows.blocks));
  JAXNORM_RETURN_IF_ERROR(reader.Read("chunk_multiple", 1, kMaxInt, &rows.chunk_multiple));
  return reader.Read("group_dims", 0, rows.sizes.size, &rows.group_dims);
}

Error CheckBuffer(const Plan& plan, int64_t buffer, const Buffers& buffers) {
  if (buffer < buffers.size) return Error::Success();
  return plan.Invalid("buffer " + Text(buffer) + " is asked for, the call has " + Text(buffers.size));
}

Error Multiply(const Plan& plan, const char* name, int64_t a, int64_t b, int64_t* product) {
  if (!__builtin_mul_overflow(a, b, product)) return Error::Success();
  return plan.Invalid(std::string("the number of ") + name + " does not fit 64 bits");
}

Error SizeOf(const Plan& plan, const RowDim& dim, const Buffers& buffers, int64_t* size) {
  *size = dim.dimension;
  if (dim.buffer >= 0) {
    JAXNORM_RETURN_IF_ERROR(CheckBuffer(plan, dim.buffer, buffers));
    const Buffer& buffer = buffers[dim.buffer];
    if (dim.dimension >= buffer.rank) {
      return plan.Invalid("dimension " + Text(dim.dimension) + " of buffer " + Text(dim.buffer) +
                          " is asked for, it has " + Text(buffer.rank));
    }
    *size = buffer.dims[dim.dimension];
  }
  if (*size % dim.divisor != 0) {
    return plan.Invalid("a dimension of " + Text(*size) + " is no multiple of " + Text(dim.divisor));
  }
  *size /= dim.divisor;
  if (*size < 0 || *size > kMaxInt) {
    return plan.Invalid("a row dimension must be at most " + Text(kMaxInt) + ", got " + Text(*size));
  }
  return Error::Success();
}

}  // namespace

Error Plan::Invalid(const std::string& what) const {
  return Error::InvalidArgument("jaxnorm: " + operation + ": " + what);
}
Error Plan::Internal(const std::string& what) const { return Error::Internal("jaxnorm: " + operation + ": " + what); }

Error DecodePlan(const Attributes& attributes, Plan* plan) {
  plan->operation = attributes.operation;
  if (attributes.version != Attributes::kVersion) {
    return plan->Invalid("this program has version " + Text(attributes.version) +
                         " of the attributes, this jaxnorm knows " + Text(Attributes::kVersion) +
                         "; install the jaxnorm that made it");
  }
  if (attributes.source.empty()) return plan->Invalid("source must not be empty");
  for (std::string_view names = attributes.kernels; !names.empty();) {
    const size_t end = std::min(names.find(' '), names.size());
    plan->kernels.emplace_back(names.substr(0, end));
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  if (attributes.buffer_bytes.size > kMaxBuffers) {
    return plan->Invalid("buffer_bytes must name at most " + Text(kMaxBuffers) + " buffers, got " +
                         Text(static_cast<int64_t>(attributes.buffer_bytes.size)));
  }
  plan->buffer_bytes.assign(attributes.buffer_bytes.data, attributes.buffer_bytes.data + attributes.buffer_bytes.size);
  JAXNORM_RETURN_IF_ERROR(DecodeRows(attributes, plan));
  for (Reader reader(*plan, attributes.launches); !reader.done();) {
    if (plan->launches.size() == kMaxLaunches) return plan->Invalid("at most " + Text(kMaxLaunches) + " launches");
    JAXNORM_RETURN_IF_ERROR(DecodeLaunch(*plan, &reader, &plan->launches.emplace_back()));
  }
  return Error::Success();
}

Error CheckBuffers(const Plan& plan, const Buffers& buffers) {
  for (const Launch& launch : plan.launches) {
    for (const Word& word : launch.all_words) {
      if (word.kind == Word::kBuffer) JAXNORM_RETURN_IF_ERROR(CheckBuffer(plan, word.value, buffers));
    }
  }
  for (int i = 0; i < buffers.size; ++i) {
    if (buffers[i].bytes > 0 && reinterpret_cast<uintptr_t>(buffers[i].data) % kBufferAlignment != 0) {
      return plan.Invalid("buffer " + Text(i) + " must begin on a multiple of " + Text(kBufferAlignment) + " bytes");
    }
  }
  if (plan.buffer_bytes.empty()) return Error::Success();
  if (static_cast<int64_t>(plan.buffer_bytes.size()) != buffers.size) {
    return plan.Invalid("the call has " + Text(buffers.size) + " buffers, its plan is for " +
                        Text(static_cast<int64_t>(plan.buffer_bytes.size())));
  }
  for (int i = 0; i < buffers.size; ++i) {
    if (buffers[i].bytes != plan.buffer_bytes[i]) {
      return plan.Invalid("buffer " + Text(i) + " has " + Text(buffers[i].bytes) + " bytes, its plan is for " +
                          Text(plan.buffer_bytes[i]));
    }
  }
  return Error::Success();
}

namespace {

int64_t DivideUp(int64_t n, int64_t unit) { return n / unit + (n % unit != 0); }

// How many blocks (or clusters) share the tiles of a group. The device holds `resident` blocks (or clusters) at once.
int64_t CountChunks(const RowTiles& tiling, int64_t groups, int64_t tiles, int64_t resident) {
  if (tiling.blocks == 0) return tiles;
  if (tiling.chunk_multiple == 1) return std::clamp<int64_t>(std::min(tiling.blocks, resident) / groups, 1, tiles);
  // The largest multiple that the device holds may leave many multiprocessors idle. If there are more blocks than it
  // holds, some begin when others have ended.
  int64_t best = std::min(tiling.chunk_multiple, tiles), least = std::numeric_limits<int64_t>::max();
  const int64_t most = std::min(tiling.blocks / groups, tiles);
  for (int64_t chunks = tiling.chunk_multiple; chunks <= most; chunks += tiling.chunk_multiple) {
    const int64_t time = DivideUp(groups * chunks, resident) * (DivideUp(tiles, chunks) + kTilesOfStart);
    if (time < least) best = chunks, least = time;
  }
  return best;
}

}  // namespace

Error CountRows(const Plan& plan, const Buffers& buffers, int64_t resident, Rows* rows) {
  const RowTiles& tiling = plan.rows;
  int64_t groups = 1, group_rows = 1;
  for (int k = 0; k < tiling.sizes.size; ++k) {
    int64_t size;
    JAXNORM_RETURN_IF_ERROR(SizeOf(plan, tiling.sizes[k], buffers, &size));
    rows->dims[k] = static_cast<int32_t>(size);
    if (k < tiling.group_dims) {
      JAXNORM_RETURN_IF_ERROR(Multiply(plan, "groups", groups, size, &groups));
    } else {
      JAXNORM_RETURN_IF_ERROR(Multiply(plan, "rows", group_rows, size, &group_rows));
    }
  }
  JAXNORM_RETURN_IF_ERROR(Multiply(plan, "rows", groups, group_rows, &rows->rows));
  if (groups > kMaxInt) {
    return plan.Invalid("at most " + Text(kMaxInt) + " groups of rows are possible, got " + Text(groups));
  }
  rows->groups = static_cast<int32_t>(groups);
  rows->chunks = 0;
  if (rows->rows == 0) return Error::Success();

  const int64_t tiles = DivideUp(group_rows, tiling.rows_per_tile);
  const int64_t chunks = CountChunks(tiling, groups, tiles, std::max<int64_t>(resident, 1));
  if (tiling.blocks > 0 && groups * chunks > std::max(tiling.blocks, groups)) {
    return plan.Invalid(Text(groups) + " groups of rows need " + Text(groups * chunks) + " blocks, the plan has " +
                        Text(tiling.blocks));
  }
  if (chunks > kMaxInt / groups) {
    return plan.Invalid(Text(rows->rows) + " rows in tiles of " + Text(tiling.rows_per_tile) + " need more than " +
                        Text(kMaxInt) + " blocks");
  }
  for (const Launch& launch : plan.launches) {
    // A block that waits for a block which can not begin would wait for ever.
    if (launch.rule == Rule::kTiles && launch.cooperative && groups * chunks > resident) {
      return plan.Invalid(Text(groups * chunks * launch.cluster) + " blocks must run at once, the GPU runs " +
                          Text(resident * launch.cluster));
    }
  }
  rows->chunks = static_cast<int32_t>(chunks);
  return Error::Success();
}

Error SizeLaunch(const Plan& plan, const Launch& launch, const Rows& rows, Size* size) {
  *size = {launch.grid, launch.block};
  switch (launch.rule) {
    case Rule::kFixed:
      break;
    case Rule::kTiles: {
      const int64_t blocks = int64_t{rows.groups} * rows.chunks * launch.cluster;
      if (blocks > kMaxInt) {
        return plan.Invalid(Text(rows.rows) + " rows in tiles of " + Text(plan.rows.rows_per_tile) +
                            " need more than " + Text(kMaxInt) + " blocks");
      }
      size->grid.x = static_cast<unsigned>(blocks);
      break;
    }
    case Rule::kGroupsAlongY:
      size->grid.y = static_cast<unsigned>(std::clamp<int64_t>(rows.groups, 1, kMaxGridYZ));
      size->block = {32, 1, 1};
      while (size->block.y < 32 && (plan.rows.group_dims == 0 || static_cast<int>(size->block.y) < rows.chunks)) {
        size->block.y *= 2;
      }
      break;
  }
  return Error::Success();
}

void FillArguments(const Launch& launch, const Buffers& buffers, const Rows& rows, uint64_t tag, Arguments* arguments) {
  size_t at = 0;
  for (const Word& word : launch.all_words) {
    // An int lies in the low half, which comes first in memory.
    uint64_t value = static_cast<uint64_t>(word.value);
    switch (word.kind) {
      case Word::kBuffer:
        value = reinterpret_cast<uint64_t>(buffers[static_cast<int>(word.value)].data) + word.offset;
        break;
      case Word::kTag:
        value = tag;
        break;
      case Word::kRows:
        value = rows.rows;
        break;
      case Word::kChunks:
        value = rows.chunks;
        break;
      case Word::kGroups:
        value = rows.groups;
        break;
      case Word::kRowDim:
        value = rows.dims[word.value];
        break;
      default:
        break;
    }
    arguments->words[at++] = value;
  }
  at = 0;
  for (size_t i = 0; i < launch.words.size(); ++i) {
    arguments->pointers[i] = &arguments->words[at];
    at += launch.words[i];
  }
}

}  // namespace jaxnorm
