-- slurm.conf: JobSubmitPlugins=lua; this file is job_submit.lua in slurm.conf's folder, on the controller.
--
-- Prologs must not query slurmctld, and Slurm passes them no request of a job except for GPUs. So this appends
-- "[vram_mib=N]" to the comment of a job that requests vram, which the prolog gets in its environment. A job that no node
-- can serve is refused when it is submitted, where its user reads the reason.

-- Set this: the MiB of the largest card of the cluster. A lease lies on one card.
LARGEST_CARD_MIB = 81920

local SCALE = { [""] = 1, k = 2^10, m = 2^20, g = 2^30, t = 2^40, p = 2^50 }
local MARK = "%s*%[vram_mib=%d+%]"

-- The MiB per node of a "gres" list, as Slurm counts them: the last entry of vram, 1 without a number.
local function vram_mib(tres)
  local mib = 0
  for entry in string.gmatch(tres or "", "[^,]+") do
    local rest = string.match(entry, "^%s*gres[:/]vram(.*)$")
    if rest == "" then
      mib = 1
    elseif rest then
      local digits, unit = string.match(rest, "^[:=]%s*%+?(%d+)([KMGTPkmgtp]?)%s*$")
      if digits then mib = tonumber(digits) * SCALE[string.lower(unit)] end
    end
  end
  return mib
end

-- Whatever a user writes there, the mark is this file's.
local function marked(comment, mib)
  local text = string.gsub(comment or "", MARK, "")
  if mib == 0 then return text end
  return text .. (text == "" and "" or " ") .. string.format("[vram_mib=%d]", mib)
end

local function check(mib)
  if mib <= LARGEST_CARD_MIB then return slurm.SUCCESS end
  slurm.log_user("gpulease: no card has %d MiB; the largest has %d. A lease lies on one card", mib, LARGEST_CARD_MIB)
  return slurm.ERROR
end

function slurm_job_submit(job, partitions, user)
  local mib = vram_mib(job.tres_per_node)
  if mib > 0 or string.find(job.comment or "", MARK) then job.comment = marked(job.comment, mib) end
  return check(mib)
end

function slurm_job_modify(job, record, partitions, user)
  local mib = vram_mib(job.tres_per_node or record.tres_per_node)
  if job.comment or job.tres_per_node then job.comment = marked(job.comment or record.comment, mib) end
  return check(mib)
end

return slurm.SUCCESS
