-- slurm.conf: JobSubmitPlugins=lua; this file is job_submit.lua in slurm.conf's folder, on the controller.
--
-- Prologs must not query slurmctld, and Slurm passes them no request of a job except for GPUs. So this appends a mark to
-- the comment of a job that requests vram, which the prolog gets in its environment: "[vram_mib=N]", with "cards=M" for
-- a job of several cards and "type=T" for a job that names a card's type. A job that no node can serve is refused when
-- it is submitted, where its user reads the reason.

-- Set this: the MiB of the largest card of the cluster. A lease lies on one card.
LARGEST_CARD_MIB = 81920

local SCALE = { [""] = 1, k = 2^10, m = 2^20, g = 2^30, t = 2^40, p = 2^50 }
local MARK = "%s*%[vram_mib=[^%]]*%]"

local function refuse(...)
  slurm.log_user("gpulease: " .. string.format(...))
  return nil
end

-- The count at the end of an entry, without its separator: "", "4096", "4G"; nil if it is no count.
local function count_of(text)
  if text == "" then return 1 end
  local digits, unit = string.match(text, "^%+?(%d+)([KMGTPkmgtp]?)%s*$")
  return digits and tonumber(digits) * SCALE[string.lower(unit)]
end

-- What a "gres" list requests, as Slurm counts it: the last entry of each name, 1 without a number. nil: refused.
local function requested(tres)
  local want = { mib = 0, cards = 1 }
  for entry in string.gmatch(tres or "", "[^,]+") do
    local name, rest = string.match(entry, "^%s*gres[:/](vram[%w_]*)[:=]?(.*)$")
    if name == "vram" then
      local card_type, count = string.match(rest, "^([%a_][%w_.-]*)[:=]?(.*)$")
      want.mib = count_of(count or rest)
      if want.mib == nil then return refuse("'%s' must be vram:MIB or vram:TYPE:MIB", entry) end
      if want.card_type and want.card_type ~= card_type then return refuse("a job's vram is of one type") end
      want.card_type = card_type
    elseif name == "vram_cards" then
      want.cards = count_of(rest)
      if not want.cards then return refuse("'%s' must be vram_cards:NUMBER", entry) end
    end
  end
  if want.mib == 0 then
    want.cards = 1
  elseif want.cards < 1 or want.cards > 64 then
    return refuse("vram_cards must be 1 to 64, not %d", want.cards)
  elseif want.mib % want.cards ~= 0 then
    return refuse("vram:%d can't be shared equally by %d cards", want.mib, want.cards)
  elseif want.mib / want.cards > LARGEST_CARD_MIB then
    return refuse(
      "no card has %d MiB; the largest has %d. A lease lies on one card", want.mib / want.cards, LARGEST_CARD_MIB
    )
  end
  return want
end

-- Slurm would count these, but the job's leases are the node's: without a lease its program would fail.
local function counts_elsewhere(job)
  for _, field in ipairs({ "tres_per_job", "tres_per_socket", "tres_per_task" }) do
    if string.find(job[field] or "", "gres[:/]vram") then
      refuse("vram is requested per node: --gres=vram:MIB, and vram_cards:NUMBER for several cards")
      return true
    end
  end
  return false
end

-- Whatever a user writes there, the mark is this file's.
local function marked(comment, want)
  local text = string.gsub(comment or "", MARK, "")
  if want.mib == 0 then return text end
  local mark = string.format("[vram_mib=%d", want.mib)
  if want.cards > 1 then mark = mark .. string.format(" cards=%d", want.cards) end
  if want.card_type then mark = mark .. " type=" .. want.card_type end
  return text .. (text == "" and "" or " ") .. mark .. "]"
end

function slurm_job_submit(job, partitions, user)
  local want = requested(job.tres_per_node)
  if not want or counts_elsewhere(job) then return slurm.ERROR end
  if want.mib > 0 or string.find(job.comment or "", MARK) then job.comment = marked(job.comment, want) end
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, user)
  local want = requested(job.tres_per_node or record.tres_per_node)
  if not want or counts_elsewhere(job) then return slurm.ERROR end
  if job.comment or job.tres_per_node then job.comment = marked(job.comment or record.comment, want) end
  return slurm.SUCCESS
end

return slurm.SUCCESS
